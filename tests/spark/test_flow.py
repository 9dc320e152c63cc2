"""The whole patient flow against the real records API, with faults, without Dagster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from examples.records_api import DataType, RecordBook, create_app
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from tests.serving import bound

pytestmark = pytest.mark.spark

PLAYBOOK = Path(__file__).parents[2] / "playbooks" / "patient_flow.yaml"
FACILITIES, PATIENTS = 2, 6
VALIDATION = "SELECT * FROM patient_flow.validation WHERE execution_id = $1 ORDER BY facility_id"

Flow = Callable[[str], Awaitable[ExecutionState]]


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serves an application on a free port and gives its address."""
    listener, server = bound(), uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    listener.listen()
    serving = asyncio.create_task(server.serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving


def without(app: ASGIApp, path: str) -> ASGIApp:
    """An application that knows nothing of one path."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == path:
            scope = {**scope, "path": "/nothing"}
        await app(scope, receive, send)

    return answer


@pytest.fixture
async def flow(settings: Settings, sessions: SparkSessions, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Flow]:
    own = settings.model_copy(update={"default_postgres_credential": "embedded"})
    engine = await Engine.open(own, spark=sessions.get)

    async def run(api_url: str) -> ExecutionState:
        monkeypatch.setenv("NOETL_CREDENTIAL_RECORDS_API", api_url)
        workload: dict[str, Any] = {"facilities": FACILITIES, "patients": PATIENTS, "batch_size": 3}
        return await engine.run(load_playbook(PLAYBOOK), workload)

    yield run
    await engine.close()


async def test_every_patient_arrives_in_spite_of_faults(flow: Flow, pool: asyncpg.Pool) -> None:
    async with served(create_app(seed=7, faults=0.1)) as api_url:
        state = await flow(api_url)
    assert state.status == "COMPLETED", state
    rows = await pool.fetch(VALIDATION, state.execution_id)
    assert [row["facility_id"] for row in rows] == [1, 2]
    book = RecordBook(7)
    for row in rows:
        assert row["complete"]
        assert {row[data_type.value] for data_type in DataType} == {PATIENTS} == {row["seeded"]}
        assert row["records"] == sum(
            book.record_count(row["facility_id"], patient, data_type)
            for patient in range(1, PATIENTS + 1)
            for data_type in DataType
        )


@pytest.mark.slow
async def test_a_missing_patient_fails_the_execution_by_name(flow: Flow, pool: asyncpg.Pool) -> None:
    app = without(create_app(seed=7), "/facilities/2/patients/6/conditions")
    async with served(app) as api_url:
        state = await flow(api_url)
    assert state.status == "FAILED"
    rows = await pool.fetch(VALIDATION, state.execution_id)
    assert [row["complete"] for row in rows] == [True, False]
    message = await pool.fetchval(
        "SELECT error FROM noetl.event WHERE execution_id = $1 AND node_name = 'report_shortfall' "
        "AND error IS NOT NULL LIMIT 1",
        state.execution_id,
    )
    assert "facility 2, conditions: F002-P00004, F002-P00005, F002-P00006" in message
