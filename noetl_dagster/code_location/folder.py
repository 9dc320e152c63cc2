"""The playbooks of a folder, compiled, with their assets as a project describes them.

A broken playbook does not affect the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from dagster import AssetKey, AssetsDefinition, AssetSpec, DagsterInvalidDefinitionError

from noetl_dagster.code_location.broken import BrokenPlaybook, meant_by
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.lineage.tables import PlaybookWriters
from noetl_dagster.compiler.specs import asset_spec
from noetl_dagster.errors import PlaybookError
from noetl_dagster.playbook.assets import key_text
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Playbook, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaybookStep:
    """A step whose result is an asset, as a translation sees it."""

    playbook: Playbook
    step: Step

    @property
    def kinds(self) -> list[str]:
        """The kinds of its tools."""
        return sorted({task.kind for task in self.step.tasks})


Translation = Callable[[AssetSpec, PlaybookStep], AssetSpec]
"""Returns Dagster's description of an asset, from the playbook's description and the step that makes the asset."""

Specs = dict[str, AssetSpec]
"""Descriptions of assets by step."""


def load_folder(
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    translation: Translation | None = None,
    beside: Sequence[AssetsDefinition] = (),
    lenient: bool = False,
) -> tuple[list[PlaybookJob], list[BrokenPlaybook]]:
    """Returns the playbooks of a folder, and those that were left out.

    Of two with one name, or with one asset, the first stays; of playbooks that read each other in a circle the last
    is left out.

    Args:
        beside: assets in Python, which may be a part of such a circle.
        lenient: unsupported tool kinds and unknown keys are warnings of its executions.
    """
    broken: list[BrokenPlaybook] = []
    playbooks: list[Playbook] = []
    for path in find_playbooks(folder, include, exclude):
        try:
            playbooks.append(load_playbook(path, lenient=lenient))
        except PlaybookError as error:
            broken.append(BrokenPlaybook(path, str(error)))
    specs: dict[str, Specs] = {}
    if translation is not None:
        playbooks, specs = _translated(playbooks, translation, broken)
    jobs: list[PlaybookJob] = []
    made = {
        playbook.asset_key(step.name): playbook.dagster.partitions
        for playbook in playbooks
        for step in playbook.steps
        if step.is_asset
    }
    writers = PlaybookWriters(playbooks)
    for playbook in playbooks:
        try:
            job = compile_playbook(playbook, made, specs.get(playbook.file, {}), writers)
            job.schedules  # noqa: B018, Dagster checks them when they are made
            jobs.append(job)
        except Exception as error:  # whatever Dagster refuses of this one does not concern the others
            logger.debug("playbook %s", playbook.file, exc_info=True)
            broken.append(_broken(playbook, f"Dagster refuses it: {error}"))
    jobs = _without_cycles(_without_duplicates(jobs, beside, broken), beside, broken)
    for one in broken:
        logger.error("playbook %s is left out:\n%s", one.file, one.why)
    return jobs, [replace(one, file=one.file.relative_to(folder), meant=meant_by(one.file)) for one in broken]


def _broken(playbook: Playbook, why: str) -> BrokenPlaybook:
    return BrokenPlaybook(Path(playbook.file), f"{playbook.file}: {why}")


def _translated(
    playbooks: Iterable[Playbook], translation: Translation, broken: list[BrokenPlaybook]
) -> tuple[list[Playbook], dict[str, Specs]]:
    """Returns the playbooks with the new keys of their assets and of those that they read, and the descriptions.

    The descriptions are by file and step.
    """
    specs: dict[str, Specs] = {}
    own: dict[str, dict[str, str]] = {}
    translated = []
    for playbook in playbooks:
        try:
            step_specs = {
                step.name: _translated_spec(PlaybookStep(playbook, step), translation)
                for step in playbook.steps
                if step.is_asset
            }
        except DagsterInvalidDefinitionError as error:
            broken.append(_broken(playbook, str(error)))
            continue
        translated.append(playbook)
        specs[playbook.file] = step_specs
        keys = {key_text(playbook.asset_key(step)): key_text(tuple(spec.key.path)) for step, spec in step_specs.items()}
        own[playbook.file] = {before: after for before, after in keys.items() if before != after}
    shared: dict[str, str] = {}
    for renamed in own.values():
        shared = renamed | shared  # of two with one key, other playbooks mean the first
    return [_renamed(one, shared | own[one.file]) for one in translated], specs


def _translated_spec(step: PlaybookStep, translation: Translation) -> AssetSpec:
    before = asset_spec(step.playbook, step.step)
    refused: str | None = None
    try:
        after = translation(before, step)
    except Exception as error:  # any exception of a user's function or template
        raise DagsterInvalidDefinitionError(
            f"step {step.step.name}: its translation fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(after, AssetSpec):
        refused = f"gives a {type(after).__name__}, not an AssetSpec"
    elif not any(after.key.path):
        refused = "gives it an empty key"
    else:
        fixed = ("partitions_def", "deps", "skippable")
        changed = next((name for name in fixed if getattr(after, name) != getattr(before, name)), None)
        if changed is not None:
            refused = f"gives it another {changed}, which the playbook itself says"
    if refused is not None:
        raise DagsterInvalidDefinitionError(f"step {step.step.name}: its translation {refused}")
    return after


def _renamed(playbook: Playbook, renamed: Mapping[str, str]) -> Playbook:
    """Returns a playbook with those of the new keys that concern it."""
    named = {key_text(playbook.asset_key(step.name)) for step in playbook.steps}
    named |= {key_text(source.asset) for step in playbook.steps for source in step.sources.values()}
    own = {before: renamed[before] for before in sorted(named & renamed.keys())}
    return playbook.model_copy(update={"renamed": own}) if own else playbook


def _without_duplicates(
    jobs: Iterable[PlaybookJob], beside: Sequence[AssetsDefinition], broken: list[BrokenPlaybook]
) -> list[PlaybookJob]:
    names: dict[str, str] = {}
    keys = {key: "an asset in Python" for assets in beside for key in assets.keys}
    unique_jobs = []
    for job in jobs:
        twins = sorted(key.to_user_string() for key in keys.keys() & set(job.plan.keys))
        if job.plan.name in names:
            broken.append(_broken(job.playbook, f"{names[job.plan.name]} has the name {job.playbook.name!r} already"))
        elif twins:
            first = keys[AssetKey.from_user_string(twins[0])]
            broken.append(_broken(job.playbook, f"{first} makes the asset {twins[0]} already; give it another key"))
        else:
            names[job.plan.name] = job.playbook.file
            keys |= dict.fromkeys(job.plan.keys, job.playbook.file)
            unique_jobs.append(job)
    return unique_jobs


def _without_cycles(
    jobs: list[PlaybookJob], beside: Sequence[AssetsDefinition], broken: list[BrokenPlaybook]
) -> list[PlaybookJob]:
    """Leaves out the last playbook of each circle: Dagster runs a playbook as one, and would refuse them all."""
    upstream = {name: reads for assets in beside for name, reads in _reads_beside(assets).items()}
    while True:
        maker = {key: job.plan.name for job in jobs for key in job.plan.keys}
        maker |= {key: name for name, (keys, _) in upstream.items() for key in keys}
        reads = {job.plan.name: {reading.key for reading in job.plan.readings} for job in jobs}
        reads |= {name: source_keys for name, (_, source_keys) in upstream.items()}
        try:
            TopologicalSorter(
                {name: {maker[key] for key in keys if key in maker} for name, keys in reads.items()}
            ).prepare()
            return jobs
        except CycleError as error:
            circle: list[str] = list(reversed(error.args[1]))
        inside = [number for number, job in enumerate(jobs) if job.plan.name in circle]
        if not inside:  # of Python assets alone, which is Dagster's to refuse
            upstream = {name: source_keys for name, source_keys in upstream.items() if name not in circle}
            continue
        why = f"playbooks read each other's assets in a circle: {' -> '.join(circle)}"
        broken.append(_broken(jobs[inside[-1]].playbook, why))
        jobs = jobs[: inside[-1]] + jobs[inside[-1] + 1 :]


def _reads_beside(assets: AssetsDefinition) -> dict[str, tuple[set[AssetKey], set[AssetKey]]]:
    """Returns, by name, the assets that a definition in Python makes as one, and those that they read."""
    if assets.can_subset:
        return {f"asset {key.to_user_string()}": ({key}, set(reads)) for key, reads in assets.asset_deps.items()}
    keys = set(assets.keys)
    if not keys:
        return {}
    reads = {key for dependencies in assets.asset_deps.values() for key in dependencies} - keys
    return {f"asset {min(key.to_user_string() for key in keys)}": (keys, reads)}
