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
from noetl_dagster.code_location.folder import load_folder
from noetl_dagster.code_location.playbooks import definitions_of_jobs
from noetl_dagster.code_location.python_assets import definitions_in_python, has_assets_in_python
from noetl_dagster.code_location.translation import Translation
from noetl_dagster.compiler.automation import (
    build_automation_sensor,
    build_observation_sensor,
    build_pool_sensor,
)
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.compiler.names import dagster_name
from noetl_dagster.compiler.session import NOETL
from noetl_dagster.playbook.loader import collector_paused
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.sensors.nats import build_event_sensor
from noetl_dagster.sensors.recovery import build_recovery_sensor
from noetl_dagster.sensors.upkeep import build_projection_sensor, build_upkeep
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)


def build_definitions(settings: Settings) -> Definitions:
    """Every playbook of ``settings.playbooks_path`` that loads, and the assets in ``*_assets.py`` beside them."""
    folder = settings.playbooks_path
    if not folder.is_dir():
        logger.warning("there are no playbooks: %s is no folder; set NOETL_PLAYBOOKS_PATH", folder.absolute())
        return control_of([], default_resource())
    with_spark = has_assets_in_python(folder)  # they may ask for the session
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
) -> Definitions:
    """The playbooks of a folder as Definitions: a job each, the assets and checks of its steps, schedules, sensors.

    A playbook that cannot be loaded takes no other with it: it is a failing check of an asset in its place.

    Args:
        path: the folder.
        include: patterns of files below it, such as ``clinical/*.yaml``; none: every playbook.
        exclude: patterns of what is left out of these.
        resources: by name, instead of what would be made: ``noetl`` (:class:`NoetlResource`), ``pyspark``
            (:class:`PySparkResource`); others are passed on.
        translation: gives what Dagster is to show of an asset (key, description, group, owners, tags, metadata,
            code version, automation, freshness) from what the playbook says and the step that makes it.
        control: with upkeep and projection, which a project has once: of several calls, one has them. What acts on
            the playbooks themselves comes with each call: recovery of executions whose process died, automation,
            observation, the slots of pools.
        beside: assets in Python which read playbooks' assets and are read by playbooks: of a circle through them the
            last playbook is left out.
        spark: with the resource ``pyspark`` also where no playbook needs it.

    Returns:
        Definitions, for :meth:`dagster.Definitions.merge`. Those of several calls share their resources.

    Raises:
        DagsterInvalidDefinitionError: there is no such folder, or a translation asks for what only a playbook can
            say.

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
            raise DagsterInvalidDefinitionError(
                f"load_playbooks: {name} is a list of patterns: [{patterns!r}]"
            )
    given = dict(resources or {})
    noetl = given.get(NOETL) or default_resource()
    if not isinstance(noetl, EngineProvider):
        raise DagsterInvalidDefinitionError(
            f"load_playbooks: the resource 'noetl' is a NoetlResource, not a {type(noetl).__name__}"
        )
    jobs, broken = load_folder(
        folder, include=include, exclude=exclude, translation=translation, beside=beside
    )
    playbooks = definitions_of_jobs(jobs, noetl, spark=spark, resources=given)
    if not jobs and not broken:
        logger.warning("there are no playbooks in %s that include and exclude leave", folder.absolute())
    among = None if control else _name(folder)
    made = {key for job in jobs if job.assets is not None for key in job.assets.keys}
    made |= {key for assets in beside for key in assets.keys}
    return Definitions.merge(
        playbooks, control_of(jobs, noetl, among), definitions_of_broken(broken, made, among or "")
    )


def _name(folder: Path) -> str:
    """Returns the part of Dagster's names that distinguishes a folder from the project's other folders."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]
    return f"{dagster_name(folder.resolve().name)}_{digest}"


@cache
def default_resource() -> NoetlResource:
    """The default engine. Merged Definitions may share a resource only if it is the same object."""
    return NoetlResource()


def control_of(
    playbooks: Sequence[PlaybookJob], noetl: EngineProvider, among: str | None = None
) -> Definitions:
    """Builds the sensors and schedules that keep a deployment going.

    These are upkeep and projection, once in a project, and the sensors of given playbooks: recovery of executions whose
    process died, automation, observation and the slots of pools.

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
