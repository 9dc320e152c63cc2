"""Without NATS the sensor still reports what finished outside of Dagster."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from dagster import DagsterInstance

from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings
from tests.playbooks import playbook
from tests.sensors.test_nats import TEXT, reporting_tick


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    with socket.socket() as taken:  # bound, and never listening
        taken.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        yield EngineProvider(settings.model_copy(update={"nats_url": url, "nats_connect_seconds": 1}))
        close_engines()


def test_a_tick_without_nats(noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    run_sync(noetl.engine().run(playbook(TEXT)))
    result = reporting_tick(noetl, dagster_instance)
    message = result.skip_reason.skip_message or ""
    assert "no events taken: NATS at" in message
    assert "2 assets of 1 executions reported" in message
