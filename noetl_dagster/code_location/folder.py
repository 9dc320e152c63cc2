"""The playbooks of a folder, compiled; a broken playbook does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from dagster import AssetKey, AssetsDefinition

from noetl_dagster.code_location.broken import BrokenPlaybook, meant_by
from noetl_dagster.code_location.translation import Specs, Translation, translated
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.lineage.tables import PlaybookWriters
from noetl_dagster.errors import PlaybookError
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Playbook

logger = logging.getLogger(__name__)


def load_folder(
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    translation: Translation | None = None,
    beside: Sequence[AssetsDefinition] = (),
) -> tuple[list[PlaybookJob], list[BrokenPlaybook]]:
    """The playbooks of a folder, and those that were left out.

    Of two with one name, or with one asset, the first stays; of playbooks that read each other in a circle the last
    is left out.

    Args:
        include: patterns of files below the folder; none: all of them.
        exclude: patterns of what is left out of these.
        translation: says what Dagster is to show of an asset instead of what its playbook says.
        beside: assets in Python, which may be a part of such a circle.
    """
    broken: list[BrokenPlaybook] = []
    playbooks: list[Playbook] = []
    for path in find_playbooks(folder, include, exclude):
        try:
            playbooks.append(load_playbook(path))
        except PlaybookError as error:
            broken.append(BrokenPlaybook(path, str(error)))
    specs: dict[str, Specs] = {}
    if translation is not None:
        playbooks, specs, failed = translated(playbooks, translation)
        broken += [BrokenPlaybook(Path(file), f"{file}: {why}") for file, why in failed.items()]
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
            job.schedules  # noqa: B018, Dagster looks at them now
            jobs.append(job)
        except Exception as error:  # whatever Dagster refuses of this one concerns no other
            logger.debug("playbook %s", playbook.file, exc_info=True)
            broken.append(_broken(playbook, f"Dagster refuses it: {error}"))
    jobs = _without_cycles(_without_duplicates(jobs, beside, broken), beside, broken)
    for one in broken:
        logger.error("playbook %s is left out:\n%s", one.file, one.why)
    return jobs, [replace(one, file=one.file.relative_to(folder), meant=meant_by(one.file)) for one in broken]


def _broken(playbook: Playbook, why: str) -> BrokenPlaybook:
    return BrokenPlaybook(Path(playbook.file), f"{playbook.file}: {why}")


def _without_duplicates(
    jobs: Iterable[PlaybookJob], beside: Sequence[AssetsDefinition], broken: list[BrokenPlaybook]
) -> list[PlaybookJob]:
    names: dict[str, str] = {}
    keys = {key: "an asset in Python" for assets in beside for key in assets.keys}
    kept = []
    for job in jobs:
        own = set(job.assets.keys) if job.assets is not None else set()
        twins = sorted(key.to_user_string() for key in own & keys.keys())
        if job.plan.name in names:
            broken.append(
                _broken(job.playbook, f"{names[job.plan.name]} has the name {job.playbook.name!r} already")
            )
        elif twins:
            first = keys[AssetKey.from_user_string(twins[0])]
            broken.append(
                _broken(job.playbook, f"{first} makes the asset {twins[0]} already; give it another key")
            )
        else:
            names[job.plan.name] = job.playbook.file
            keys |= dict.fromkeys(own, job.playbook.file)
            kept.append(job)
    return kept


def _without_cycles(
    jobs: list[PlaybookJob], beside: Sequence[AssetsDefinition], broken: list[BrokenPlaybook]
) -> list[PlaybookJob]:
    """Leaves out the last playbook of each circle: Dagster runs a playbook as one, and would refuse them all."""
    upstream = {name: reads for assets in beside for name, reads in _reads_beside(assets).items()}
    while True:
        maker = {key: job.plan.name for job in jobs if job.assets is not None for key in job.assets.keys}
        maker |= {key: name for name, (keys, _) in upstream.items() for key in keys}
        reads = {job.plan.name: {reading.key for reading in job.plan.readings} for job in jobs}
        reads |= {name: found for name, (_, found) in upstream.items()}
        try:
            TopologicalSorter(
                {name: {maker[key] for key in keys if key in maker} for name, keys in reads.items()}
            ).prepare()
            return jobs
        except CycleError as error:
            circle: list[str] = list(reversed(error.args[1]))
        inside = [number for number, job in enumerate(jobs) if job.plan.name in circle]
        if not inside:  # of Python assets alone, which is Dagster's to refuse
            upstream = {name: found for name, found in upstream.items() if name not in circle}
            continue
        why = f"playbooks read each other's assets in a circle: {' -> '.join(circle)}"
        broken.append(_broken(jobs[inside[-1]].playbook, why))
        jobs = jobs[: inside[-1]] + jobs[inside[-1] + 1 :]


def _reads_beside(assets: AssetsDefinition) -> dict[str, tuple[set[AssetKey], set[AssetKey]]]:
    """By name, what is made as one of a definition in Python, and what it reads."""
    if assets.can_subset:
        return {
            f"asset {key.to_user_string()}": ({key}, set(reads)) for key, reads in assets.asset_deps.items()
        }
    keys = set(assets.keys)
    if not keys:
        return {}
    reads = {key for found in assets.asset_deps.values() for key in found} - keys
    return {f"asset {min(key.to_user_string() for key in keys)}": (keys, reads)}
