"""Sensors of a code location that act on what its playbooks declare: automation, and the limits of pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dagster import (
    AssetsDefinition,
    AssetSelection,
    AutomationConditionSensorDefinition,
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from noetl_dagster.compiler.names import sensor_name
from noetl_dagster.playbook.models import Playbook

POOLS_INTERVAL = 60


class Automated(Protocol):
    """A compiled playbook."""

    @property
    def playbook(self) -> Playbook: ...

    @property
    def assets(self) -> AssetsDefinition | None: ...


def build_automation_sensor(jobs: Sequence[Automated], among: str | None = None) -> SensorDefinition | None:
    """The sensor that asks for assets of playbooks with ``automation``; it runs without anybody's click.

    Args:
        among: the jobs are some of the project's.
    """
    keys = [
        key
        for job in jobs
        if job.assets is not None and any(spec.automation_condition for spec in job.assets.specs)
        for key in job.assets.keys
    ]
    if not keys:
        return None
    return AutomationConditionSensorDefinition(
        sensor_name("noetl_automation", among),
        target=AssetSelection.assets(*keys),
        default_status=DefaultSensorStatus.RUNNING,
    )


def limits_of(playbooks: Iterable[Playbook]) -> dict[str, int]:
    """Slots by pool; where playbooks say different numbers, the smallest."""
    limits: dict[str, int] = {}
    for playbook in playbooks:
        for name, slots in playbook.dagster.pools.items():
            limits[name] = min(slots, limits.get(name, slots))
    return limits


def set_limits(instance: DagsterInstance, limits: dict[str, int]) -> list[str]:
    """Tells Dagster the slots of pools; gives those that were not so yet."""
    storage = instance.event_log_storage
    if not limits or not storage.supports_global_concurrency_limits:
        return []
    known = {pool.name: pool.limit for pool in storage.get_pool_limits()}
    changed = [name for name, slots in limits.items() if known.get(name) != slots]
    for name in changed:
        storage.set_concurrency_slots(name, limits[name])
    return changed


def build_pool_sensor(playbooks: Sequence[Playbook], among: str | None = None) -> SensorDefinition | None:
    """A sensor that keeps the limits of Dagster's pools as the playbooks say; None where none says any.

    Args:
        among: the playbooks are some of the project's.
    """
    limits = limits_of(playbooks)
    if not limits:
        return None

    @sensor(
        name=sensor_name("noetl_pools", among),
        description="Keeps the slots of concurrency pools as the playbooks say.",
        minimum_interval_seconds=POOLS_INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_pools(context: SensorEvaluationContext) -> SkipReason:
        changed = set_limits(context.instance, limits)
        return SkipReason(
            f"set: {', '.join(changed)}" if changed else f"{len(limits)} pools are as they should be"
        )

    return noetl_pools
