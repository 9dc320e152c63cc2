"""Definitions of given playbooks, with the resources that they need and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagster import Definitions, SourceAsset

from noetl_dagster.compiler.assets.observing import source_assets
from noetl_dagster.compiler.job import PlaybookJob, compile_playbook
from noetl_dagster.compiler.ops import RESULTS_IO, needs_spark
from noetl_dagster.compiler.session import NOETL, PYSPARK
from noetl_dagster.compiler.tokens import TOKENS, token_io_manager
from noetl_dagster.io_managers.results import NoetlResultIOManager
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.noetl import NoetlResource


def definitions_of(playbooks: Iterable[Playbook], noetl: NoetlResource) -> Definitions:
    """Definitions of given playbooks over a given engine."""
    return definitions_of_jobs([compile_playbook(playbook) for playbook in playbooks], noetl)


def definitions_of_jobs(
    jobs: Sequence[PlaybookJob], noetl: NoetlResource, *, spark: bool = False
) -> Definitions:
    """Definitions of compiled playbooks.

    Args:
        spark: others need the Spark resource too.
    """
    return Definitions(
        assets=[
            *(job.assets for job in jobs if job.assets is not None),
            *_sources(jobs, noetl),
        ],
        jobs=[job.job for job in jobs],
        schedules=[schedule for job in jobs for schedule in job.schedules],
        resources=resources_of(noetl, spark=spark or any(needs_spark(job.playbook) for job in jobs)),
    )


def _sources(jobs: Sequence[PlaybookJob], noetl: NoetlResource) -> list[SourceAsset]:
    """What playbooks observe, each source once, and none that a playbook makes."""
    made = {key for job in jobs if job.assets is not None for key in job.assets.keys}
    found = {source.key: source for job in jobs for source in source_assets(job.playbook, noetl)}
    return [source for key, source in found.items() if key not in made]


def resources_of(noetl: NoetlResource, *, spark: bool = True) -> dict[str, object]:
    """The resources that compiled playbooks require.

    Args:
        spark: with the Spark session, whose packages take a while to import.
    """
    results = NoetlResultIOManager(lambda: noetl.engine().runtime.results)
    resources: dict[str, object] = {NOETL: noetl, RESULTS_IO: results, TOKENS: token_io_manager}
    if spark:
        from noetl_dagster.resources.spark import PySparkResource

        resources[PYSPARK] = PySparkResource()
    return resources
