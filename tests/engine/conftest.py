"""An engine on a database of its own, driven without Dagster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.settings import Settings
from tests.playbooks import playbook

Run = Callable[..., Awaitable[ExecutionState]]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings in which any ``auth`` of a postgres task means the test's database."""
    return settings.model_copy(update={"default_postgres_credential": "embedded"})


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
