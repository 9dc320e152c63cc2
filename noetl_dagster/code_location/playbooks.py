"""Definitions of given playbooks, with the resources that they need and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from dagster import Definitions, SourceAsset

from noetl_dagster.compiler.automation import source_assets
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.lineage.tables import PlaybookWriters
from noetl_dagster.compiler.ops import RESULTS_IO, TOKENS_IO, token_io_manager
from noetl_dagster.compiler.session import NOETL, PYSPARK
from noetl_dagster.io_managers.results import NoetlResultIOManager
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider


def definitions_of(playbooks: Iterable[Playbook], noetl: EngineProvider) -> Definitions:
    """Definitions of given playbooks over a given engine."""
    together = list(playbooks)
    writers = PlaybookWriters(together)
    return definitions_of_jobs([compile_playbook(one, writers=writers) for one in together], noetl)


def definitions_of_jobs(
    jobs: Sequence[PlaybookJob],
    noetl: EngineProvider,
    *,
    spark: bool = False,
    resources: Mapping[str, Any] = MappingProxyType({}),
) -> Definitions:
    """Definitions of compiled playbooks.

    Args:
        spark: others need the Spark resource too.
        resources: instead of those that would be made, and further ones.
    """
    spark = spark or any(region.needs_spark for job in jobs for region in job.plan.regions)
    return Definitions(
        assets=[
            *(job.assets for job in jobs if job.assets is not None),
            *_sources(jobs, noetl),
        ],
        jobs=[job.job for job in jobs],
        schedules=[schedule for job in jobs for schedule in job.schedules],
        resources={**resources_of(noetl, spark=spark), **resources},
    )


def _sources(jobs: Sequence[PlaybookJob], noetl: EngineProvider) -> list[SourceAsset]:
    """Returns the sources that playbooks observe: each one once, without those that a playbook produces."""
    made = {key for job in jobs if job.assets is not None for key in job.assets.keys}
    found = {source.key: source for job in jobs for source in source_assets(job.playbook, noetl)}
    return [source for key, source in found.items() if key not in made]


def resources_of(noetl: EngineProvider, *, spark: bool = True) -> dict[str, object]:
    """Returns the resources that compiled playbooks require: the same objects for one engine.

    Definitions that are merged may share a resource only as one object.

    Args:
        spark: with the Spark session, whose packages take a while to import.
    """
    resources: dict[str, object] = {NOETL: noetl, RESULTS_IO: _results_of(noetl), TOKENS_IO: token_io_manager}
    if spark:
        resources[PYSPARK] = _spark()
    return resources


_results: WeakValueDictionary[int, NoetlResultIOManager] = WeakValueDictionary()


def _results_of(noetl: EngineProvider) -> NoetlResultIOManager:
    """The IO manager over an engine, which holds on to it: no other has its ``id`` meanwhile."""
    found = _results.get(id(noetl))
    if found is None:
        found = _results[id(noetl)] = NoetlResultIOManager(lambda: noetl.engine().runtime.results)
    return found


@cache
def _spark() -> object:
    from noetl_dagster.resources.spark import PySparkResource

    return PySparkResource()
