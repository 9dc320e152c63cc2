"""Servers for tests that run side by side, and an engine over names of each test alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.code_location.materialize import MaterializedPlaybook, materialize_playbook
from noetl_dagster.compiler.session import NOETL
from noetl_dagster.embedded.isolation import isolated
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings


@dataclass(frozen=True, slots=True)
class NoetlTest:
    """What one test works with.

    Attributes:
        settings: with the addresses of the servers, and names of this test alone.
        resource: the engine over them, as ``load_playbooks(..., resources={"noetl": ...})`` takes it.
    """

    settings: Settings
    resource: EngineProvider

    def materialize(
        self, playbook: Path | str | Playbook, workload: Mapping[str, Any] | None = None, **options: Any
    ) -> MaterializedPlaybook:
        """:func:`noetl_dagster.materialize_playbook` on this test's servers; ``options`` are its own."""
        resources = {**options.pop("resources", {}), NOETL: self.resource}
        return materialize_playbook(playbook, workload, resources=resources, **options)


@pytest.fixture(scope="session")
def noetl_services(pytestconfig: pytest.Config) -> Iterator[Settings]:
    """Settings with the addresses of the running servers."""
    home = Path(os.environ.get("NOETL_TEST_HOME", pytestconfig.rootpath / ".noetl-test")).resolve()
    home.mkdir(parents=True, exist_ok=True)
    services = Settings(home=home)
    with (home / "in-use.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield embedded.ensure(services)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_UN)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            embedded.down(services)


@pytest.fixture
def noetl_settings(noetl_services: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of one test."""
    with isolated(noetl_services, tmp_path_factory.mktemp("noetl")) as own:
        yield own


@pytest.fixture
def noetl(noetl_settings: Settings) -> Iterator[NoetlTest]:
    """An engine of one test, and playbooks on it: ``noetl.materialize("playbooks/squares.yaml")``."""
    resource = EngineProvider(noetl_settings)
    yield NoetlTest(noetl_settings, resource)
    resource.close()
