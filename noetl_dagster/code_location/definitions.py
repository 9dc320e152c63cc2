"""Definitions of a folder of playbooks, for a code location or for any other Dagster project."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dagster import AssetsDefinition, DagsterInvalidDefinitionError, Definitions, SensorDefinition

from noetl_dagster.code_location.broken import definitions_of_broken
from noetl_dagster.code_location.folder import Translation, load_folder
from noetl_dagster.code_location.playbooks import definitions_of_jobs
from noetl_dagster.code_location.python_assets import PATTERN, definitions_in_python
from noetl_dagster.compiler.automation import (
    build_automation_sensor,
    build_observation_sensor,
    build_pool_sensor,
)
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.compiler.names import NOETL, dagster_name
from noetl_dagster.playbook.catalog import files_below
from noetl_dagster.process.collector import collector_paused
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.sensors.maintenance import build_maintenance
from noetl_dagster.sensors.nats_events import build_event_sensor
from noetl_dagster.sensors.projection import build_projection_sensor
from noetl_dagster.sensors.reaper import build_reaper
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)


def build_definitions(settings: Settings) -> Definitions:
    """Returns the playbooks of ``settings.playbooks_path`` that load, and the assets in ``*_assets.py`` beside them."""
    folder = settings.playbooks_path
    if not folder.is_dir():
        logger.warning("there are no playbooks: %s is no folder; set NOETL_PLAYBOOKS_PATH", folder.absolute())
        return control_of([], default_resource())
    with_spark = bool(files_below(folder, PATTERN))  # they may ask for the session
    with collector_paused():
        beside = definitions_in_python(folder)
        in_python = [one for one in beside.assets or () if isinstance(one, AssetsDefinition)]
        return Definitions.merge(load_playbooks(folder, spark=with_spark, beside=in_python), beside)


def load_playbooks(
    path: Path | str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    resources: Mapping[str, Any] | None = None,
    translation: Translation | None = None,
    control: bool = True,
    spark: bool = False,
    beside: Sequence[AssetsDefinition] = (),
    lenient: bool = False,
) -> Definitions:
    """Loads the playbooks of a folder as Definitions: their jobs, assets, checks, schedules and sensors.

    A playbook that cannot be loaded does not affect the others. It is shown as an asset with a failing check.

    Args:
        path: the folder.
        include: patterns of files below it, such as ``clinical/*.yaml``; none: every playbook.
        exclude: patterns of files to leave out.
        resources: by name, instead of the default ones: ``noetl`` (:class:`NoetlResource`), ``pyspark``
            (:class:`PySparkResource`); others are passed on.
        translation: returns Dagster's description of an asset (key, description, group, owners, tags, metadata, code
            version, automation, freshness) from the playbook's description and the step that makes the asset.
        control: with upkeep and projection. Only one call of a project has them. Every call has the sensors of its
            playbooks: recovery of executions whose process died, automation, observation, the slots of pools.
        beside: assets in Python that read assets of playbooks and are read by playbooks. If they form a circle, the
            last playbook in it is left out.
        lenient: unsupported tool kinds and unknown keys are no errors: executions show them as warnings, and ignore the
            keys.
        spark: with the resource ``pyspark`` even if no playbook needs it.

    Returns:
        Definitions, for :meth:`dagster.Definitions.merge`. Those of several calls share their resources.

    Raises:
        DagsterInvalidDefinitionError: there is no such folder, or a translation changes something that only the
            playbook defines.

    Examples:
        >>> defs = Definitions.merge(
        ...     load_playbooks("playbooks", exclude=["drafts/*"]), Definitions(assets=[totals])
        ... )
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DagsterInvalidDefinitionError(
            f"{folder.absolute()} is no folder; load_playbooks takes the folder that playbooks are in"
        )
    for name, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise DagsterInvalidDefinitionError(f"load_playbooks: {name} is a list of patterns: [{patterns!r}]")
    own_resources = dict(resources or {})
    noetl = own_resources.get(NOETL) or default_resource()
    if not isinstance(noetl, EngineProvider):
        raise DagsterInvalidDefinitionError(
            f"load_playbooks: the resource 'noetl' is a NoetlResource, not a {type(noetl).__name__}"
        )
    jobs, broken = load_folder(
        folder, include=include, exclude=exclude, translation=translation, beside=beside, lenient=lenient
    )
    playbooks = definitions_of_jobs(jobs, noetl, spark=spark, resources=own_resources)
    if not jobs and not broken:
        logger.warning("there are no playbooks in %s that include and exclude leave", folder.absolute())
    among = None
    if not control:  # the part of Dagster's names that distinguishes this folder from the project's others
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]
        among = f"{dagster_name(folder.resolve().name)}_{digest}"
    made = {key for job in jobs for key in job.plan.keys} | {key for one in beside for key in one.keys}
    return Definitions.merge(
        playbooks, control_of(jobs, noetl, among), definitions_of_broken(broken, made, among or "")
    )


@cache
def default_resource() -> NoetlResource:
    """Returns the default engine. Merged Definitions may share a resource only if it is the same object."""
    return NoetlResource()


def control_of(playbooks: Sequence[PlaybookJob], noetl: EngineProvider, among: str | None = None) -> Definitions:
    """Builds the sensors and schedules that keep a deployment running.

    These are upkeep and projection, once in a project, and the sensors of given playbooks: recovery of executions whose
    process died, automation, observation and the slots of pools.

    Args:
        among: only the sensors of the playbooks, with names that contain this.
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
    pairs = (build_reaper(noetl), build_maintenance(noetl))
    upkeep = Definitions(
        jobs=[job for job, _ in pairs],
        schedules=[schedule for _, schedule in pairs],
        sensors=[build_event_sensor(noetl), build_projection_sensor(noetl)],
    )
    return Definitions.merge(upkeep, acting)
