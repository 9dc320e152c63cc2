"""``error.kind`` says what went wrong in the same words, whatever tool it was."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import IntegrityError, ReferenceNotAvailableError, StorageError, ToolError, kind_of
from noetl_dagster.tools.access import clients
from noetl_dagster.tools.sql.connection import kind_of_state
from tests import forked

NOWHERE = {"type": "postgres", "url": "postgresql://u:hidden-pass@127.0.0.1:1/x"}
NO_SERVER = {"type": "nats", "url": "nats://127.0.0.1:1"}


async def failed(run: Any, kind: str, **config: Any) -> tuple[str, bool]:
    with pytest.raises(ToolError) as caught:
        await run(kind, **config)
    assert "hidden-pass" not in str(caught.value)
    return caught.value.kind, caught.value.retryable


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("http", {"url": "http://127.0.0.1:1/"}, ("connection", True)),
        ("http", {"url": "/relative"}, ("schema", False)),
        ("http", {"url": "ftp://example.org"}, ("client_error", False)),
        ("postgres", {"command": "select 1", "auth": NOWHERE}, ("db_connection", True)),
        ("postgres", {"command": "select * from nowhere"}, ("db", False)),
        ("postgres", {"command": ""}, ("schema", False)),
        ("postgres", {"command": "set local statement_timeout = 1; select pg_sleep(600)"}, ("db_timeout", False)),
        ("duckdb", {"command": "select * from nowhere"}, ("db", False)),
        ("duckdb", {"command": "create table t (a int primary key); insert into t values (1), (1)"},
         ("db_constraint", False)),
        ("duckdb", {"command": "select * from read_csv('/nowhere.csv')"}, ("storage", False)),
        ("nats", {"operation": "kv_fetch"}, ("schema", False)),
        ("python", {"code": "1 / 0"}, ("python", False)),
        ("python", {"code": "raise ConnectionError('gone')"}, ("python", True)),
        ("python", {"script": "nowhere.py"}, ("not_found", False)),
        ("shell", {"cmds": "exit 3"}, ("unknown", False)),
        ("shell", {"cmds": "sleep 600", "timeout": 0.1}, ("timeout", True)),
        ("artifact", {"action": "get", "name": "nothing", "step": "nowhere"}, ("not_found", False)),
        ("artifact", {"action": "put"}, ("schema", False)),
        ("secrets", {"secret": "NOWHERE_TO_BE_FOUND"}, ("credential", False)),
        ("transfer", {"source": {"kind": "postgres", "query": "select 1 as a"}, "target": "s3"}, ("schema", False)),
    ],
)  # fmt: skip
async def test_every_tool_speaks_the_same_words(
    run: Any, kind: str, config: dict[str, Any], expected: tuple[str, bool]
) -> None:
    assert await failed(run, kind, **config) == expected


async def test_a_broken_constraint(run: Any, pool: asyncpg.Pool) -> None:
    await pool.execute("create table t (id int primary key)")
    command = "insert into t values (1), (1)"

    assert await failed(run, "postgres", command=command) == ("db_constraint", False)


async def test_a_nats_server_that_is_away(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 1.0)

    found = await failed(run, "nats", operation="kv_get", bucket="x", key="y", auth=NO_SERVER)
    assert found == ("connection", True)


async def test_a_time_out_of_http(run: Any, server: str) -> None:
    assert await failed(run, "http", url=f"{server}/slow", timeout=0.1) == ("timeout", True)


async def test_a_locked_database_file(run: Any, tmp_path: Path) -> None:
    code = "import duckdb, sys, time; own = duckdb.connect(sys.argv[1]); print('open', flush=True); time.sleep(600)"
    path = str(tmp_path / "own.db")
    holder = forked.start([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    await asyncio.to_thread(holder.stdout.readline)
    try:
        assert await failed(run, "duckdb", command="select 1", database=path) == ("db_connection", True)
    finally:
        holder.kill()
        holder.stdout.close()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("08006", "db_connection"),
        ("57P01", "db_connection"),
        ("3D000", "db_connection"),
        ("28P01", "auth"),
        ("42501", "auth"),
        ("23503", "db_constraint"),
        ("40P01", "db_deadlock"),
        ("40001", "db_deadlock"),
        ("57014", "db_timeout"),
        ("55P03", "db_timeout"),
        ("42601", "db"),
        ("", "db"),
    ],
)
def test_states_of_postgres(state: str, kind: str) -> None:
    assert kind_of_state(state) == kind


class Forbidden(Exception):
    """As object stores call it."""


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (None, "storage"),
        (PermissionError(errno.EACCES, "no"), "storage_access"),
        (Forbidden(), "storage_access"),
        (OSError(errno.ENOSPC, "full"), "storage_quota"),
        (OSError(errno.EDQUOT, "too much"), "storage_quota"),
        (OSError(errno.EIO, "broken"), "storage"),
        (ConnectionResetError(), "storage"),
    ],
)
def test_storage_says_why(cause: BaseException | None, kind: str) -> None:
    error = StorageError("no")
    error.__cause__ = cause

    assert kind_of(error) == kind


def test_other_errors() -> None:
    assert kind_of(ReferenceNotAvailableError("gone")) == "not_found"
    assert kind_of(IntegrityError("other")) == "storage"
    assert kind_of(ValueError("x")) == "unknown"


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("postgres", {"command": "select 1 as id"}),
        ("postgres", {"command": "select 1 as id", "as": "rows"}),
        ("duckdb", {"command": "select 1 as id"}),
        ("transfer", {"source": {"kind": "http", "url": "http://127.0.0.1:1/"},
                      "target": {"kind": "postgres", "table": "t"}}),
    ],
)  # fmt: skip
async def test_a_chunk_size_that_is_no_number(run: Any, kind: str, config: dict[str, Any]) -> None:
    for size in ("lots", -1, [5]):
        with pytest.raises(ToolError, match=r"in step stage: chunk_size .* is no number of rows") as caught:
            await run(kind, chunk_size=size, **config)
        assert caught.value.kind == "schema"
