"""The kinds snowflake and bigquery.

What they share is tested in test_databases.py, with ADBC's driver of SQLite. The slow test runs snowflake's driver against
fakesnow, a stand-in that speaks Snowflake's protocol over DuckDB. There is no stand-in for BigQuery: of it the options and the
dialect are tested.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adbc_driver_sqlite.dbapi
import pytest

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.sql.databases import adbc
from noetl_dagster.tools.sql.databases.tool import DatabaseTool

IS_REQUIRED = "TEST_SNOWFLAKE"


class SqliteOfAdbc(adbc.AdbcDatabase):
    dialect = "sqlite"
    driver = "adbc_driver_sqlite"

    def connect(self) -> Any:  # of all drivers it alone takes no options
        return adbc_driver_sqlite.dbapi.connect(self._options["uri"], autocommit=True)


def caller(box: ToolContext, auth: Any = None) -> Any:
    async def run(command: Any, **config: Any) -> Any:
        fields = {"command": command, **config}
        task = Task(name="task_0", kind="snowflake", config=fields)
        return await DatabaseTool().run(ToolCall(7001, "stage", task, fields, {}, auth), box)

    return run


S = "adbc.snowflake.sql."
B = "adbc.bigquery.sql."


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (
            {"account": "a-b", "user": "me", "password": "p", "warehouse": "w", "database": "d", "role": "r"},
            {"username": "me", "password": "p", f"{S}warehouse": "w", f"{S}db": "d", f"{S}role": "r"},
        ),
        (
            {"sf_account": "a-b", "sf_user": "me", "private_key": "PEM", "private_key_passphrase": "x"},
            {
                "username": "me",
                f"{S}auth_type": "auth_jwt",
                f"{S}client_option.jwt_private_key_pkcs8_value": "PEM",
                f"{S}client_option.jwt_private_key_pkcs8_password": "x",
            },
        ),
        (
            {"account": "a-b", "token": "t"},
            {f"{S}auth_type": "auth_oauth", f"{S}client_option.auth_token": "t"},
        ),
    ],
)
def test_snowflake_credentials(data: dict[str, Any], options: dict[str, str]) -> None:
    found = adbc.snowflake_options(Credential("own", CredentialType.SNOWFLAKE, data))

    assert found == {**options, f"{S}account": "a-b", f"{S}client_option.disable_telemetry": "true"}


KEY = {"type": "service_account", "project_id": "p", "private_key": "PEM"}


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({"project": "p", "dataset": "d", "location": "EU"}, {f"{B}dataset_id": "d", f"{B}location": "EU"}),
        *(
            (
                {"service_account_key": key},
                {
                    f"{B}auth_type": f"{B}auth_type.json_credential_string",
                    f"{B}auth_credentials": json.dumps(KEY, separators=(",", ":")),
                },
            )
            for key in (KEY, json.dumps(KEY))
        ),
        (
            {"project_id": "p", "keyfile": "/k.json"},
            {f"{B}auth_type": f"{B}auth_type.json_credential_file", f"{B}auth_credentials": "/k.json"},
        ),
    ],
)
def test_bigquery_credentials(data: dict[str, Any], options: dict[str, str]) -> None:
    found = adbc.bigquery_options(Credential("own", CredentialType.BIGQUERY, data))

    assert found == {**options, f"{B}project_id": "p"}


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("snowflake", {"user": "me", "password": "p"}, "has no 'account'"),
        ("snowflake", {"account": "a", "user": "me"}, "needs 'user' with 'password' or 'private_key', or 'token'"),
        ("snowflake", {"account": "a", "user": "me", "private_key_path": "/no.pem"}, "private_key_path cannot be read"),
        ("bigquery", {"dataset": "d"}, "has no 'project'"),
    ],
)
def test_credentials_that_are_wrong(kind: str, data: dict[str, Any], message: str) -> None:
    read = adbc.snowflake_options if kind == "snowflake" else adbc.bigquery_options

    with pytest.raises(CredentialError, match=message):
        read(Credential("own", CredentialType(kind), data))


def test_what_snowflake_reports_of_changes() -> None:
    database = adbc.SnowflakeDatabase({})

    assert database.affected(["number of rows inserted"], lambda: [(3,)]) == 3
    assert database.affected(["number of rows inserted", "number of rows updated"], lambda: [(3, 4)]) == 7
    assert database.affected(["status"], lambda: [("created",)]) == 0
    assert database.affected(["number"], lambda: [(3,)]) is None


@pytest.mark.skipif(IS_REQUIRED not in os.environ, reason="the slow test here brings the driver and fakesnow")
async def test_snowflakes_own_driver(box: ToolContext, run: Any, tmp_path: Path) -> None:
    import fakesnow

    with fakesnow.server() as server:
        place = {name: server[name] for name in ("account", "host", "port", "protocol", "user", "password")}
        auth = {"type": "snowflake", **place, "database": "db1", "schema": "s1"}
        sql = caller(box, auth)
        await sql(["create database if not exists db1", "create schema if not exists db1.s1"])
        await sql("create table t (id int, name varchar, price number(10, 2))")
        changed = await sql("insert into t values (:id, :name, 2.5), (2, null, 3)", params={"id": 1, "name": "it's"})
        data = (await sql("select id, name, price from t where id < ? order by id", params=[9])).data
        with pytest.raises(ToolError) as caught:
            await sql("select * from missing")
        source = {"kind": "snowflake", "auth": auth, "query": "select * from t"}
        await run("transfer", source=source, target={"path": str(tmp_path / "rows.jsonl")})

    assert changed.data["row_count"] == 2
    assert data["rows"] == [{"ID": 1, "NAME": "it's", "PRICE": 2.5}, {"ID": 2, "NAME": None, "PRICE": 3}]
    assert caught.value.kind == "db"
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_snowflake_against_fakesnow(tmp_path: Path) -> None:
    if find_spec("uv") is None:
        pytest.skip("uv is in the environments of make setup")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    # fakesnow needs other versions than requirements.lock has; newer connectors lack a module that it imports
    wanted = [*project["project"]["optional-dependencies"]["snowflake"], "fakesnow[server]"]
    wanted += ["snowflake-connector-python<5", f"duckdb=={importlib.metadata.version('duckdb')}"]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", str(tmp_path), *wanted], check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "own_driver", __file__]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), IS_REQUIRED: "1"}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
