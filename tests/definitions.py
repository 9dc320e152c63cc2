"""Definitions of playbooks that tests have in memory."""

from __future__ import annotations

from collections.abc import Iterable

from dagster import Definitions

from noetl_dagster.code_location.playbooks import definitions_of_jobs
from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.compiler.lineage.tables import PlaybookWriters
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider


def definitions_of(playbooks: Iterable[Playbook], noetl: EngineProvider) -> Definitions:
    """Compiles playbooks over an engine."""
    together = list(playbooks)
    writers = PlaybookWriters(together)
    return definitions_of_jobs([compile_playbook(one, writers=writers) for one in together], noetl)
