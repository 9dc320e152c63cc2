"""``kind: duckdb``: SQL over files, results by reference and lists, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from noetl_dagster.errors import ErrorKind, NoetlError, ToolError, kind_of
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable
from noetl_dagster.tools.sql.prepare import prepare_statements
from noetl_dagster.tools.sql.statements import BoundStatement
from noetl_dagster.tools.sql.views import NoRowsError, Source, create_view, mount_object_storage, source_of

IN_MEMORY = ":memory:"


class DuckdbTool(Tool):
    """Runs SQL in DuckDB.

    Input: ``command`` (one or more statements) or ``script``; ``params`` as for postgres; ``database`` (a
    file, relative to the playbook's folder; default: in memory, for this call). Each input that is a result's
    reference (``rows: "{{ load.ref }}"``) or a list of mappings is a view of that name; Parquet on the shared
    volume and in object storage is read in place. ``read_parquet('s3://bucket/key')`` reads the minio tier,
    ``read_parquet('gs://bucket/key')`` the gcs tier.

    Output: as postgres: ``command_0``, ... and the last one's ``rows``, ``row_count``, ``columns``. With
    ``as: table`` the last statement's rows as one Arrow table, which the result store keeps as Parquet.

    Raises ``ToolError``, retryable when another process holds the database file.
    """

    kind = "duckdb"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        statements = await prepare_statements(call, box)
        views = await _views(call, box)
        database = str(call.config.get("database") or IN_MEMORY)
        path = database if database == IN_MEMORY else str(Path(call.folder, database))
        try:
            connection = await asyncio.to_thread(duckdb.connect, path)
            try:
                job = asyncio.to_thread(_run, connection, box.settings, statements, views, _as_table(call))
                return ToolResult(data=await _interruptible(job, connection))
            finally:
                await asyncio.to_thread(connection.close)
        except (duckdb.Error, NotJsonableError, OSError) as error:
            text = box.credentials.redact(f"duckdb in step {call.step}: {type(error).__name__}: {error}")
            locked = isinstance(error, duckdb.IOException) and "lock" in str(error).lower()
            kind = "db_connection" if locked else kind_of_duckdb(error)
            raise ToolError(text, kind=kind, retryable=locked, code=type(error).__name__) from None


def kind_of_duckdb(error: BaseException) -> ErrorKind:
    """What an exception of DuckDB means; of others as everywhere."""
    match error:
        case duckdb.ConstraintException():
            return "db_constraint"
        case duckdb.ConnectionException():
            return "db_connection"
        case duckdb.HTTPException():
            return "connection"
        case duckdb.PermissionException():
            return "storage_access"
        case duckdb.IOException():
            return "storage"
        case duckdb.Error():
            return "db"
        case NotJsonableError():
            return "transform"
    return kind_of(error)


async def _interruptible(job: Any, connection: duckdb.DuckDBPyConnection) -> Any:
    """Awaits a thread; on cancellation DuckDB stops its query, and only then is the connection free."""
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        connection.interrupt()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _as_table(call: ToolCall) -> bool:
    return str(call.config.get("as") or "rows").lower() in ("table", "arrow", "parquet")


async def _views(call: ToolCall, box: Toolbox) -> dict[str, Source]:
    """What can be read as a table, by the name of the input."""
    found: dict[str, Source] = {}
    for name, value in call.input.items():
        try:
            source = await source_of(value, box.results, name)
        except NoRowsError as error:
            raise ToolError(f"duckdb: {error}", kind="schema") from None
        if source is not None:
            found[name] = source
    return found


def _run(
    connection: duckdb.DuckDBPyConnection,
    settings: Settings,
    statements: Sequence[BoundStatement],
    views: Mapping[str, Any],
    as_table: bool,
) -> Any:
    mount_object_storage(connection, settings)
    for name, source in views.items():
        try:
            create_view(connection, settings, name, source)
        except NoetlError as error:
            raise ToolError(f"duckdb: input {name!r}: {error}", kind=error.kind) from None
    results: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for index, statement in enumerate(statements):
        values = list(statement.values) or None
        if as_table and index == len(statements) - 1:
            relation = connection.sql(statement.text, params=values)
            if relation is None:
                raise ToolError("duckdb: 'as: table' needs a last statement that returns rows", kind="schema")
            return relation.to_arrow_table()
        cursor = connection.execute(statement.text, values)
        result = _result(cursor, statement.text)
        results[f"command_{index}"] = result
        if "rows" in result or "rows" not in last:
            last = result
    return results | {key: value for key, value in last.items() if key != "status"}


def _result(cursor: Any, text: str) -> dict[str, Any]:
    columns = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchall() if columns else []
    if not columns or (columns in (["Count"], ["Success"]) and not _is_query(text)):
        count = int(rows[0][0]) if columns == ["Count"] and rows else 0
        return {"status": "ok", "row_count": count}
    mapped = [dict(zip(columns, map(to_jsonable, row), strict=True)) for row in rows]
    return {"status": "ok", "rows": mapped, "row_count": len(mapped), "columns": columns}


def _is_query(text: str) -> bool:
    return text.lstrip("( \n\t").lower().startswith(("select", "with", "from", "values", "table"))
