"""The kind ducklake: a catalog in PostgreSQL or a file, data in the object store or a folder.

Wheels of its extensions exist for some versions of DuckDB. Where there is none for the version of requirements.lock, the slow
test runs the others with the versions that the extra ``ducklake`` selects.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import obstore
import pyarrow as pa
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.tools.access.clients import open_bucket
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.sql.duckdb import DuckdbTool
from noetl_dagster.tools.sql.ducklake import _load

IS_REQUIRED = "TEST_DUCKLAKE"


def is_there() -> bool:
    try:
        with duckdb.connect() as connection:
            _load(connection, "ducklake")
            _load(connection, "postgres_scanner")
    except ToolError:
        return False
    return True


lake = pytest.mark.skipif(
    IS_REQUIRED not in os.environ and not is_there(),
    reason=f"no wheel of DuckLake for DuckDB {duckdb.__version__} is installed; the slow test here brings one",
)


@pytest.fixture
def database(settings: Settings) -> dict[str, Any]:
    """A catalog in the test's own database, in a schema of its own."""
    return {"auth": {"type": "postgres", "url": settings.db_url}, "metadata_schema": "lake_catalog"}


@lake
async def test_a_catalog_in_postgresql_and_data_in_the_object_store(
    run: Any, box: ToolContext, settings: Settings, database: dict[str, Any], pool: asyncpg.Pool
) -> None:
    place = {**database, "data_path": f"s3://{settings.minio_bucket}/lakes/sales/"}
    people = [{"id": number, "name": f"name {number}"} for number in range(1000)]
    await pool.execute("create schema lake_catalog")
    table = pa.Table.from_pylist(people)
    given = await box.results.put(table, execution_id=7001, step="load", name="rows", tier=StoreTier.MINIO)

    await run("ducklake", command="create table people as from given", input={"given": given}, **place)
    await run("ducklake", command="delete from people where id >= $1", params=[900], **place)
    data = (await run("ducklake", command="select count(*) as n, max(name) as last from people", **place)).data
    before = (await run("ducklake", command="select count(*) as n from people at (version => 1)", **place)).data

    store = open_bucket(settings, "s3", "")
    found = [item["path"] async for page in obstore.list(store, prefix="lakes/sales/") for item in page]
    assert data["rows"] == [{"n": 900, "last": "name 99"}]
    assert before["rows"] == [{"n": 1000}]
    assert any(path.endswith(".parquet") for path in found)


@lake
async def test_a_catalog_in_a_file(run: Any, tmp_path: Path) -> None:
    place = {"catalog": "new/sales.ducklake", "data_path": "files", "catalog_name": "sales"}

    await run("ducklake", command="create table t as select range as n from range(10000)", **place)
    data = (await run("ducklake", command="select sum(n)::int as total from sales.t", **place)).data

    assert data["rows"] == [{"total": 49995000}]
    assert (tmp_path / "new/sales.ducklake").is_file()
    assert list((tmp_path / "files").rglob("*.parquet"))


@lake
async def test_errors_and_queries_show_no_password(run: Any) -> None:
    url = "postgresql://me:the-pass-word@127.0.0.1:1/x?sslmode=disable&application_name=a%20b"

    with pytest.raises(ToolError, match="Connection refused") as caught:
        await run("ducklake", command="select 1", catalog=url, data_path="files")

    assert "the-pass-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"auth": {"type": "bearer", "token": "t"}}, "credential", "auth is of type bearer; postgres is needed here"),
        ({"catalog": {"type": "postgres", "user": "me"}}, "credential", "has neither 'url' nor 'host'"),
        ({"catalog": "/etc/other.ducklake"}, "schema", "absolute path that a template made"),
        ({"catalog": "own.ducklake", "data_path": "../other"}, "schema", "leaves its folder"),
    ],
)
async def test_catalogs_and_paths_that_are_refused(
    tool_run: Any, fields: dict[str, Any], kind: str, message: str
) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        await tool_run(fields)

    assert caught.value.kind == kind


async def test_a_missing_extension_names_the_extra(tool_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb, "__version__", "0.0.1")

    with pytest.raises(
        ToolError, match=r"pip install 'noetl-dagster\[ducklake\]'.* is not installed for DuckDB 0\.0\.1"
    ) as caught:
        await tool_run({"catalog": "own.ducklake"})

    assert caught.value.kind == "policy"


@pytest.fixture
def tool_run(box: Any, tmp_path: Path) -> Any:
    """Runs a call whose paths are made by templates, whether or not the extra is installed."""
    from noetl_dagster.playbook.models import Task
    from noetl_dagster.tools.base import ToolCall

    async def run_tool(fields: dict[str, Any]) -> Any:
        auth = fields.pop("auth", None)
        written = dict.fromkeys(fields, "{{ path }}")
        task = Task(name="task_0", kind="ducklake", config=written)
        call = ToolCall(7001, "stage", task, {"command": "select 1", **fields}, {}, auth, folder=str(tmp_path))
        return await DuckdbTool().run(call, box)

    return run_tool


@pytest.mark.slow
def test_with_the_versions_that_the_extra_selects(tmp_path: Path) -> None:
    if find_spec("uv") is None:
        pytest.skip("uv is in the environments of make setup")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    wanted = project["project"]["optional-dependencies"]["ducklake"]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", str(tmp_path), *wanted], check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), IS_REQUIRED: "1"}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
