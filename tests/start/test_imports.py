"""What each command imports: the seconds of a start are imports, and modules can be counted on any machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from tests.playbooks import text_of
from tests.start.imported import Imported, imported

DATA = {"numpy", "pandas", "polars", "pyarrow", "duckdb", "pyspark", "dagster_pyspark"}
CLOUDS = {"boto3", "botocore", "google.cloud", "google.auth", "kubernetes", "azure"}
CLIENTS = {"aiohttp", "nats", "httpx", "requests", "opentelemetry"}
SERVERS = {"fastapi", "uvicorn", "starlette", "dagster_webserver", "dagster_graphql"}
DAGSTER = {"dagster", "dagster_shared", "sqlalchemy", "alembic", "psycopg2", "grpc", "structlog"}

TWO_STEPS = text_of(
    "two",
    """
    workflow:
      - step: start
        tool: {kind: python, code: "result = {'n': 1}"}
        next: {arcs: [{step: finish}]}
      - step: finish
        tool: {kind: python, input: {n: "{{ start.n }}"}, code: "result = n + 1"}
    """,
)

WORK = """
import asyncio
from noetl_dagster.cli.commands.processes import PoolWorker
from noetl_dagster.settings import get_settings

async def work():
    worker = await PoolWorker.open(get_settings(), "one")
    stop = asyncio.Event()
    stop.set()
    await worker.run(stop)
    await worker.close()

asyncio.run(work())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one playbook, of two python steps."""
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "two.yaml").write_text(TWO_STEPS)
    return folder


@pytest.fixture
def environment(settings: Settings, folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    own = settings.model_copy(update={"playbooks_path": folder})
    return {**inherited, **embedded.environment(own)}


@pytest.mark.parametrize("command", ["status", "events"])
def test_what_looks_at_an_execution_needs_no_dagster(
    command: str, settings: Settings, environment: dict[str, str], tmp_path: Path
) -> None:
    async def run() -> int:
        engine = await Engine.open(settings)
        try:
            return (await engine.run(parse_playbook(TWO_STEPS, file="two.yaml"))).execution_id
        finally:
            await engine.close()

    found = imported(["-m", "noetl_dagster", command, str(asyncio.run(run()))], environment, tmp_path)
    found.refuse(DAGSTER | DATA | CLOUDS | CLIENTS | SERVERS)


def test_a_check_needs_neither_dagster_nor_a_database(environment: dict[str, str], folder: Path) -> None:
    found = imported(["-m", "noetl_dagster", "check", "two.yaml"], environment, folder)
    found.refuse(DAGSTER | DATA | CLOUDS | CLIENTS | SERVERS | {"asyncpg", "obstore"})


def test_a_run_imports_the_tools_of_its_playbook_only(environment: dict[str, str], folder: Path) -> None:
    found = imported(["-m", "noetl_dagster", "run", "two.yaml", "--json"], environment, folder)
    assert "dagster" in found.chains  # the account is complete
    found.refuse(DATA | CLOUDS | CLIENTS | SERVERS | {"grpc"})


def test_a_code_location_imports_what_its_playbooks_need(environment: dict[str, str], folder: Path) -> None:
    found = imported(["-c", "import noetl_dagster.definitions"], environment, folder)
    found.refuse(DATA | CLOUDS | CLIENTS | SERVERS)


def test_a_worker_needs_no_dagster(environment: dict[str, str], folder: Path) -> None:
    found = imported(["-c", WORK], environment, folder)
    found.refuse(DAGSTER | DATA | CLOUDS | SERVERS | {"opentelemetry"})


def test_who_imported_it_is_said() -> None:
    account = """
import time:       100 |        100 |     numpy.core
import time:       100 |        200 |   numpy
import time:        10 |        310 | noetl_dagster.tools
"""
    found = Imported.read("a program", account)
    with pytest.raises(AssertionError, match=r"(?s)a program.*numpy: noetl_dagster\.tools > numpy"):
        found.refuse({"numpy"})
