"""What keeps a deployment going, beside the playbooks' own jobs."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import Definitions, SensorDefinition

from noetl_dagster.compiler.assets.automation import build_automation_sensor, build_pool_sensor
from noetl_dagster.compiler.assets.observing import build_observation_sensor
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.sensors.nats import build_event_sensor
from noetl_dagster.sensors.projection import build_projection_sensor
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.sensors.upkeep import build_upkeep


def control_of(
    playbooks: Sequence[PlaybookJob], noetl: EngineProvider, among: str | None = None
) -> Definitions:
    """What keeps a deployment going: upkeep and projection, once in a project, and what acts on given playbooks, the
    recovery of executions whose process died, automation, observation and the slots of pools.

    Args:
        among: only what acts on the playbooks, under names that this sets apart from those of others in the project.
    """
    texts = [job.playbook for job in playbooks]
    sensors: list[SensorDefinition | None] = [
        build_recovery_sensor(playbooks, noetl, among) if playbooks else None,
        build_observation_sensor(texts, noetl, among),
        build_automation_sensor(playbooks, among),
        build_pool_sensor(texts, among),
    ]
    acting = Definitions(sensors=[one for one in sensors if one is not None])
    if among is not None:
        return acting
    jobs, schedules = build_upkeep(noetl)
    upkeep = Definitions(
        jobs=list(jobs),
        schedules=list(schedules),
        sensors=[build_event_sensor(noetl), build_projection_sensor(noetl)],
    )
    return Definitions.merge(upkeep, acting)
