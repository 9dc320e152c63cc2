"""An engine on a database of its own, driven without Dagster."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions

Run = Callable[..., Awaitable[ExecutionState]]

HEAD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: sample, path: tests/sample}
"""


def playbook(text: str) -> Playbook:
    """A playbook from its ``workload`` and ``workflow``."""
    return parse_playbook(HEAD + textwrap.dedent(text), file="sample.yaml")


@pytest.fixture(scope="package")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSessions]:
    """One Spark session for all tests of the package: starting one takes seconds."""
    home = tmp_path_factory.mktemp("spark-home")
    owner = SparkSessions(Settings(home=home, spark_driver_memory="512m", spark_master="local[2]"))
    yield owner
    owner.stop()


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


@pytest.fixture
def run(engine: Engine) -> Run:
    async def run(text: str, **workload: Any) -> ExecutionState:
        return await engine.run(playbook(text), workload)

    return run
