"""The kinds that run SQL: their fields; servers, DuckDB and DuckLake, and SQLite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import CHUNK_SIZE, DATABASE_FILE, SQL_FIELD, TIMEOUT, Spellings, ToolKind
from noetl_dagster.playbook.wording import described

_SQL: dict[str | Spellings, str] = {
    SQL_FIELD: "One or more statements, or a list of them",
    "script": "File or URL with the statements: a path, or {uri, source: {type}}",
    ("params", "parameters"): (
        "Values of the statements: a mapping for :name, a list for $1, $2; default: the task's input"
    ),
    "as": "Form of the result: rows, or table for one Parquet table by reference",
    CHUNK_SIZE: "Maximum of rows in a chunk of a large result",
    "numbers": "Form of decimal numbers in rows: text with all digits (default), or float for the nearest doubles",
}
_SERVER = _SQL | {TIMEOUT: "Seconds after which the statements are stopped and the call fails"}
_FILE: dict[str | Spellings, str] = {
    DATABASE_FILE: "Database file, relative to the playbook's folder; default: in memory, for this call only"
}
_KEY = "Unique column that is not null; rows are ordered by it, and a restarted call continues after the last"
_LAKE: dict[str | Spellings, str] = {
    ("catalog", "catalog_connection"): "Catalog: a postgres credential, an address, or a DuckDB file; default: auth",
    "data_path": "Folder of the data files, in a bucket or on this machine",
    "catalog_name": "Name of the lake in the statements; default: lake",
    "metadata_schema": "Existing PostgreSQL schema for the tables of the catalog",
}
_OF_FILES = ("read_only", "extensions", "gcs_credential")
_OF_SERVERS = ("pool", "db_schema", "fetch", "autocommit", "transaction")


def _sql(name: str, tool: str, fields: Mapping[str | Spellings, str], **others: Any) -> ToolKind:
    words = {"as": ("rows", "table", "arrow", "parquet"), "numbers": ("text", "float")}
    others |= {"words": words, "result": ("rows", "columns", "row_count")}
    return ToolKind(name, f"noetl_dagster.tools.sql.{tool}", fields, ("command", "script"), **others)


def _check_postgres(block: Block, config: dict[str, Any]) -> None:
    if isinstance(config.get("key"), (list, dict)):
        remedy = "name one whose values are unique and never null, or make one of several in the SQL"
        block.error(f"key must be the name of one column, found {described(config['key'])}; {remedy}", "key")


_IN_PROCESS = {"takes_references": True, "keeps_to_driver": True}
_DATABASES = "databases.tool:DatabaseTool"
KINDS = (
    *(
        _sql(name, _DATABASES, _SERVER, without_effect=_OF_SERVERS, extra=name)
        for name in ("bigquery", "mysql", "snowflake")
    ),
    _sql(
        "postgres",
        "postgres:PostgresTool",
        _SERVER | {"key": _KEY},
        without_effect=_OF_SERVERS,
        check=_check_postgres,
    ),
    _sql("sqlite", _DATABASES, _SERVER | _FILE, without_effect=("read_only",), keeps_to_driver=True),
    _sql("duckdb", "duckdb:DuckdbTool", _SQL | _FILE, without_effect=_OF_FILES, **_IN_PROCESS),
    _sql(
        "ducklake",
        "duckdb:DuckdbTool",
        _SQL | _LAKE,
        without_effect=("create_catalog", "use_catalog"),
        extra="ducklake",
        **_IN_PROCESS,
    ),
)
