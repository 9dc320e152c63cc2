"""What keeps a deployment going, beside the playbooks' own jobs."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import Definitions

from noetl_dagster.compiler.assets.automation import build_automation_sensor, build_pool_sensor
from noetl_dagster.compiler.assets.observing import build_observation_sensor
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.schedules.upkeep import build_upkeep
from noetl_dagster.sensors.nats import build_event_sensor
from noetl_dagster.sensors.projection import build_projection_sensor
from noetl_dagster.sensors.recovery import build_recovery_sensor


def control_of(playbooks: Sequence[PlaybookJob], noetl: EngineProvider) -> Definitions:
    """What keeps a deployment going: upkeep, projection and the recovery of executions whose process died."""
    jobs, schedules = build_upkeep(noetl)
    sensors = [build_event_sensor(noetl), build_projection_sensor(noetl)]
    if playbooks:
        sensors.append(build_recovery_sensor(playbooks, noetl))
    texts = [job.playbook for job in playbooks]
    own = (
        build_observation_sensor(texts, noetl),
        build_automation_sensor(playbooks),
        build_pool_sensor(texts),
    )
    sensors += [one for one in own if one is not None]
    return Definitions(jobs=list(jobs), schedules=list(schedules), sensors=sensors)
