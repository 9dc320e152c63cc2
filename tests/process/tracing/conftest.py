"""Executions whose traces go to a collector of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.process import otlp
from noetl_dagster.settings import Settings
from tests.process.tracing.collector import Collector, collecting


@pytest.fixture(autouse=True)
def _sent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LINGER_SECONDS", 0.05)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def settings(settings: Settings, collector: Collector) -> Settings:
    return settings.model_copy(update={"tracing_endpoint": collector.url})


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()
