"""Fixtures for tests of playbooks on real servers, ``pytest_plugins = ["noetl_dagster.testing"]``, and runs with mocks.

PostgreSQL, NATS and an S3 store of ``noetl-dagster[embedded]`` start with the first test that needs them, in
``.noetl-test`` below pytest's root folder (``NOETL_TEST_HOME``). All test sessions of that folder share the servers,
and the last session stops them. The fixture ``noetl`` gives each test its own database, bucket and subjects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.code_location.materialize import MaterializedPlaybook, materialize_playbook
from noetl_dagster.compiler.names import NOETL
from noetl_dagster.embedded.isolation import isolated
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.testing.runs import PlaybookRun, home_of_tests, run_playbook, servers

__all__ = ["NoetlTest", "PlaybookRun", "noetl", "noetl_services", "noetl_settings", "run_playbook"]


@dataclass(frozen=True, slots=True)
class NoetlTest:
    """The servers and the engine of one test.

    Attributes:
        settings: the addresses of the servers, and names that only this test uses.
        resource: the engine, for ``load_playbooks(..., resources={"noetl": ...})``.
    """

    settings: Settings
    resource: EngineProvider

    def materialize(
        self, playbook: Path | str | Playbook, workload: Mapping[str, Any] | None = None, **options: Any
    ) -> MaterializedPlaybook:
        """Calls :func:`noetl_dagster.materialize_playbook` with this test's servers; ``options`` are passed on."""
        resources = {**options.pop("resources", {}), NOETL: self.resource}
        return materialize_playbook(playbook, workload, resources=resources, **options)

    def run_playbook(
        self,
        playbook: Path | str | Playbook,
        workload: Mapping[str, Any] | None = None,
        *,
        mocks: Mapping[str, Any] | None = None,
    ) -> PlaybookRun:
        """Calls :func:`run_playbook` with this test's servers."""
        return run_playbook(playbook, workload, mocks=mocks, resource=self.resource)


@pytest.fixture(scope="session")
def noetl_services(pytestconfig: pytest.Config) -> Iterator[Settings]:
    """Returns settings with the addresses of the running servers."""
    with servers(home_of_tests(pytestconfig.rootpath)) as settings:
        yield settings


@pytest.fixture
def noetl_settings(noetl_services: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Returns the settings of one test."""
    with isolated(noetl_services, tmp_path_factory.mktemp("noetl")) as own:
        yield own


@pytest.fixture
def noetl(noetl_settings: Settings) -> Iterator[NoetlTest]:
    """Returns the engine of one test: ``noetl.materialize("playbooks/squares.yaml")``."""
    resource = EngineProvider(noetl_settings)
    yield NoetlTest(noetl_settings, resource)
    resource.close()
