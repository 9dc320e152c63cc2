"""Engines and pool workers on a database of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.processes import killed_in_the_end
from tests.service.conftest import serving
from tests.service.conftest import start as start


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """No worker counts as lost because the machine is busy: whatever runs twice is a defect."""
    return settings.model_copy(
        update={
            "worker_heartbeat_seconds": 20.0,
            "command_heartbeat_seconds": 0.5,
            "command_heartbeat_timeout_seconds": 600.0,
        }
    )


def soon_missed(settings: Settings) -> Settings:
    """For tests that wait until a worker counts as lost: reports and leases in a test's time."""
    return settings.model_copy(update={"worker_heartbeat_seconds": 1.0, "command_heartbeat_timeout_seconds": 5.0})


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


@asynccontextmanager
async def control_plane(settings: Settings, transport: EventTransport) -> AsyncIterator[Settings]:
    """Settings of the engine and its workers; with an HTTP API where the transport needs one."""
    own = settings.model_copy(update={"event_transport": transport})
    if transport is EventTransport.DIRECT:
        yield own
        return
    async with serving(own) as service:
        yield service.settings


Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(settings: Settings) -> Iterator[Spawn]:
    """Starts worker processes."""

    def spawn(worker_id: str, *options: str, **changes: Any) -> subprocess.Popen[str]:
        own = settings.model_copy(update=changes)
        return start_process(
            [sys.executable, "-m", "noetl_dagster", "worker", "--id", worker_id, *options],
            env={"PATH": "/usr/bin:/bin", "NOETL_LOG_LEVEL": "INFO", **embedded.environment(own)},
            stdout=subprocess.PIPE,
            text=True,
        )

    with killed_in_the_end() as start_process:
        yield spawn
