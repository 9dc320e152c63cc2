"""Definitions of a code location from a folder of playbooks."""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetsDefinition, Definitions

from noetl_dagster.code_location.beside import definitions_beside, has_assets_beside
from noetl_dagster.code_location.broken import definitions_of_broken
from noetl_dagster.code_location.folder import load_folder
from noetl_dagster.code_location.playbooks import definitions_of, definitions_of_jobs, resources_of
from noetl_dagster.compiler.assets.automation import build_automation_sensor, build_pool_sensor
from noetl_dagster.compiler.assets.observing import build_observation_sensor
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.playbook.loader import collector_paused
from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.schedules.upkeep import build_upkeep
from noetl_dagster.sensors.nats import build_event_sensor
from noetl_dagster.sensors.projection import build_projection_sensor
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.settings import Settings


def build_definitions(settings: Settings) -> Definitions:
    """Every playbook of the folder that loads, and the assets in ``*_assets.py`` beside them. What is broken
    is left out, with its errors in the log and as a failing check of an asset in its place."""
    noetl = NoetlResource()
    with collector_paused():
        beside = definitions_beside(settings.playbooks_path)
        in_python = [one for one in beside.assets or () if isinstance(one, AssetsDefinition)]
        jobs, broken = load_folder(settings, in_python)
        with_spark = has_assets_beside(settings.playbooks_path)  # they may ask for the session
        playbooks = definitions_of_jobs(jobs, noetl, spark=with_spark)
        return Definitions.merge(playbooks, control_of(jobs, noetl), definitions_of_broken(broken), beside)


def control_of(playbooks: Sequence[PlaybookJob], noetl: NoetlResource) -> Definitions:
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


__all__ = ["PlaybookJob", "build_definitions", "definitions_of", "load_folder", "resources_of"]
