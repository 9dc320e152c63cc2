"""Schedules of a playbook: a run at each tick, or one of each partition that is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import product
from typing import Any

from dagster import (
    DagsterInstance,
    DefaultScheduleStatus,
    MultiPartitionKey,
    PartitionsDefinition,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    TimeWindowPartitionsDefinition,
    partition_loading_context,
)

from noetl_dagster.compiler.assets.partitions import definition_of
from noetl_dagster.compiler.names import dagster_name
from noetl_dagster.playbook.assets import PartitionsSpec, ScheduleSpec, ScheduleStatus
from noetl_dagster.playbook.models import Playbook


def schedules_of(
    playbook: Playbook, job: Any, run_config: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[ScheduleDefinition]:
    """The schedules of a playbook's job.

    Args:
        run_config: gives the run config of a workload.
    """
    return [_schedule(playbook, spec, job, run_config(spec.workload)) for spec in playbook.dagster.schedules]


def _schedule(playbook: Playbook, spec: ScheduleSpec, job: Any, config: dict[str, Any]) -> ScheduleDefinition:
    def requests(context: ScheduleEvaluationContext) -> Iterator[RunRequest | SkipReason]:
        moment = context.scheduled_execution_time
        dimensions = playbook.dagster.partitions
        if not dimensions:
            yield RunRequest(run_key=moment.isoformat(), run_config=config)
            return
        keys = due(dimensions, moment, context.instance)
        if not keys:
            yield SkipReason("no partition is due")
        for key in keys:
            yield RunRequest(run_key=f"{key} {moment.isoformat()}", run_config=config, partition_key=key)

    running = spec.status is ScheduleStatus.RUNNING
    return ScheduleDefinition(
        name=f"{dagster_name(playbook.name)}_{spec.name}",
        job=job,
        cron_schedule=spec.cron,
        execution_timezone=spec.timezone,
        execution_fn=requests,
        default_status=DefaultScheduleStatus.RUNNING if running else DefaultScheduleStatus.STOPPED,
        description=f"{playbook.metadata.path}: {spec.name}",
    )


def due(dimensions: Sequence[PartitionsSpec], moment: datetime, instance: DagsterInstance) -> list[str]:
    """Keys that a tick is for: the last window that has ended, and every key of what is no time."""
    with partition_loading_context(effective_dt=moment, dynamic_partitions_store=instance):
        found = {one.name: _due(definition_of(one)) for one in dimensions}
    if len(found) == 1:
        return next(iter(found.values()))
    return [str(MultiPartitionKey(dict(zip(found, keys, strict=True)))) for keys in product(*found.values())]


def _due(definition: PartitionsDefinition) -> list[str]:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        last = definition.get_last_partition_key()
        return [] if last is None else [last]
    return list(definition.get_partition_keys())
