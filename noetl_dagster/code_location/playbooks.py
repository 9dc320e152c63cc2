"""Definitions of given playbooks, with the resources that they need and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from dagster import Definitions

from noetl_dagster.compiler.automation import source_assets
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.compiler.names import NOETL, PYSPARK
from noetl_dagster.compiler.ops import RESULTS_IO, TOKENS_IO, TokenIOManager
from noetl_dagster.io_managers.results import NoetlResultIOManager
from noetl_dagster.resources.engines import EngineProvider


def definitions_of_jobs(
    jobs: Sequence[PlaybookJob],
    noetl: EngineProvider,
    *,
    spark: bool = False,
    resources: Mapping[str, Any] = MappingProxyType({}),
) -> Definitions:
    """Returns Definitions of compiled playbooks.

    Args:
        spark: with the Spark resource, even if no playbook needs it.
        resources: instead of those that would be made, and further ones.
    """
    spark = spark or any(region.needs_spark for job in jobs for region in job.plan.regions)
    made = {key for job in jobs for key in job.plan.keys}
    return Definitions(
        assets=[
            *(job.assets for job in jobs if job.assets is not None),
            *source_assets((job.playbook for job in jobs), noetl, made),
        ],
        jobs=[job.job for job in jobs],
        schedules=[schedule for job in jobs for schedule in job.schedules],
        resources={**resources_of(noetl, spark=spark), **resources},
    )


def resources_of(noetl: EngineProvider, *, spark: bool = True) -> dict[str, object]:
    """Returns the resources that compiled playbooks require: the same objects for one engine.

    Definitions that are merged may share a resource only as one object.

    Args:
        spark: with the Spark session, whose packages take a while to import.
    """
    resources: dict[str, object] = {NOETL: noetl, RESULTS_IO: _results_of(noetl), TOKENS_IO: _TOKENS}
    if spark:
        resources[PYSPARK] = _spark()
    return resources


_TOKENS = TokenIOManager()
_results: WeakValueDictionary[int, NoetlResultIOManager] = WeakValueDictionary()


def _results_of(noetl: EngineProvider) -> NoetlResultIOManager:
    """Returns the IO manager over an engine. It keeps the engine alive, so no other has its ``id`` meanwhile."""
    io_manager = _results.get(id(noetl))
    if io_manager is None:
        io_manager = _results[id(noetl)] = NoetlResultIOManager(lambda: noetl.engine().runtime.results)
    return io_manager


@cache
def _spark() -> object:
    from noetl_dagster.resources.spark import PySparkResource

    return PySparkResource()
