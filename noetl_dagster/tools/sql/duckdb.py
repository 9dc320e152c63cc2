"""``kind: duckdb``: SQL over files, results by reference and lists, in this process; and DuckDB files as targets.

A ledger in a file holds what sinks and transfers have published in it.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from noetl_dagster.errors import ErrorKind, NoetlError, ToolError, kind_of
from noetl_dagster.machine import memory_limit
from noetl_dagster.playbook.templates.environment import sql_literal
from noetl_dagster.settings import Settings
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, count_of
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.files import check_path
from noetl_dagster.tools.rows.arrow import json_rows
from noetl_dagster.tools.rows.columns import check_names
from noetl_dagster.tools.sql.ducklake import lake_of
from noetl_dagster.tools.sql.fetching import FETCHED, FetchedRows, interruptible, result_of_batches
from noetl_dagster.tools.sql.running import numbers_of, prepare_statements, promoted, wants_table
from noetl_dagster.tools.sql.statements import BoundStatement
from noetl_dagster.tools.sql.tables import quoted
from noetl_dagster.tools.sql.views import (
    NoRowsError,
    RowsSource,
    create_view,
    mount_object_storage,
    source_of,
)

IN_MEMORY = ":memory:"

AHEAD_BYTES = 64 * 1024  # of rows that DuckDB produces before they are fetched, as it counts them
FREED_BYTES = 16 * 1024**2
"""DuckDB returns freed memory of this size to the system: the buffer in which it reads a file of lines."""


class DuckdbTool(Tool):
    """Runs SQL in DuckDB.

    Input: ``command`` (one or more statements) or ``script``; ``params`` as for postgres; ``database`` (a
    file, relative to the playbook's folder; default: in memory, for this call). Each input that is a result's
    reference (``rows: "{{ load.ref }}"``) or a list of mappings is a view of that name; Parquet on the shared
    volume and in object storage is read in place. ``read_parquet('s3://bucket/key')`` reads the minio tier,
    ``read_parquet('gs://bucket/key')`` the gcs tier.

    Output: as of postgres: ``command_0``, ... and the last one's ``rows``, ``row_count``, ``columns``; many rows are
    stored in chunks of at most ``chunk_size`` rows. With ``as: table`` the last statement's rows are one Arrow table,
    which the result store keeps as Parquet.

    Raises ``ToolError``, retryable when another process holds the database file.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the call's statements."""
        statements = await prepare_statements(call, context)
        with tempfile.TemporaryDirectory(prefix="noetl-duckdb-") as folder:
            return await self._run(call, context, statements, Path(folder))

    async def _run(
        self, call: ToolCall, context: ToolContext, statements: Sequence[BoundStatement], folder: Path
    ) -> ToolResult:
        views = await _views(call, context, folder)
        attach = (await lake_of(call, context)).attach if call.task.kind == "ducklake" else None
        database = str(call.config.get("database") or IN_MEMORY)
        written = call.task.config.get("database", IN_MEMORY)
        check_path(database, written, call.folder, context.settings, f"duckdb in step {call.step}, database")
        path = database if database == IN_MEMORY else str(Path(call.folder, database))
        try:
            async with await ChunkWriter.open(call, context, size=count_of(call, "chunk_size")) as writer:
                if writer.is_whole:
                    return ToolResult(ref=await writer.finish({}))
                rows = FetchedRows(writer, call, context)
                connection = await asyncio.to_thread(duckdb.connect, path)
                try:
                    _limit_memory(connection, context.settings, folder)
                    work = partial(_run, connection, context.settings, attach, statements, views, numbers_of(call))
                    job = asyncio.to_thread(work, rows, wants_table(call))
                    data = await interruptible(job, connection.interrupt)
                finally:
                    await asyncio.to_thread(connection.close)
                if not rows.in_chunks:
                    return ToolResult(data=data)
                at = ("rows", f"command_{len(statements) - 1}.rows")
                return ToolResult(ref=await writer.finish(data, at))
        except (duckdb.Error, OSError) as error:
            cause = own_error(error)
            text = f"{type(cause).__name__}: {cause}"
            held = is_held(cause)
            kind = "db_connection" if held else kind_of_duckdb(cause)
            raise call.error(text, kind, retryable=held, code=type(cause).__name__) from None


def _limit_memory(connection: duckdb.DuckDBPyConnection, settings: Settings, folder: Path) -> None:
    """Limits the memory of a connection, which spills into the folder."""
    limit = memory_limit()
    memory = settings.duckdb_memory or (None if limit is None else f"{limit // 2} bytes")
    if memory is not None:
        connection.execute(f"SET memory_limit = {sql_literal(memory)}")
    connection.execute(f"SET temp_directory = {sql_literal(str(folder / 'spilled'))}")
    connection.execute(f"SET streaming_buffer_size = '{AHEAD_BYTES} bytes'")
    connection.execute(f"SET allocator_bulk_deallocation_flush_threshold = '{FREED_BYTES} bytes'")


_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (duckdb.ConstraintException, "db_constraint"),
    (duckdb.ConnectionException, "db_connection"),
    (duckdb.HTTPException, "connection"),
    (duckdb.PermissionException, "storage_access"),
    (duckdb.IOException, "storage"),
    (duckdb.Error, "db"),
)
_STREAM_ERROR = re.compile(r"([A-Z][A-Za-z ]*) Error: ")


def own_error(error: Exception) -> Exception:
    """Returns DuckDB's exception for an error of a stream of Arrow tables, which has only its text."""
    match = _STREAM_ERROR.match(str(error)) if isinstance(error, OSError) else None
    kind = match and getattr(duckdb, f"{match[1].replace(' ', '')}Exception", duckdb.Error)
    return kind(str(error)) if kind else error


def kind_of_duckdb(error: BaseException) -> ErrorKind:
    """Returns the kind of an exception of DuckDB; of any other exception as everywhere."""
    return next((kind for cause, kind in _KINDS if isinstance(error, cause)), None) or kind_of(error)


def is_held(error: BaseException) -> bool:
    """Returns whether an exception means that another process holds the database file."""
    return isinstance(error, duckdb.IOException) and "lock" in str(error).lower()


async def _views(call: ToolCall, context: ToolContext, folder: Path) -> dict[str, RowsSource]:
    """Returns the inputs that are readable as tables, by name."""
    sources: dict[str, RowsSource] = {}
    for name, value in call.input.items():
        try:
            source = await source_of(value, context.results, name, folder)
        except NoRowsError as error:
            raise ToolError(f"duckdb: {error}", kind="schema") from None
        if source is not None:
            sources[name] = source
    return sources


def _run(
    connection: duckdb.DuckDBPyConnection,
    settings: Settings,
    attach: Callable[[duckdb.DuckDBPyConnection], None] | None,
    statements: Sequence[BoundStatement],
    views: Mapping[str, Any],
    numbers: Numbers,
    fetched: FetchedRows,
    as_table: bool,
) -> Any:
    mount_object_storage(connection, settings)
    for name, source in views.items():
        try:
            create_view(connection, settings, name, source)
        except NoetlError as error:
            raise ToolError(f"duckdb: input {name!r}: {error}", kind=error.kind) from None
    if attach is not None:
        attach(connection)
    results = []
    for index, statement in enumerate(statements):
        is_last = index == len(statements) - 1
        relation = connection.sql(statement.text, params=list(statement.values) or None)
        if as_table and is_last:
            if relation is None:
                raise ToolError("duckdb: 'as: table' needs a last statement that returns rows", kind="schema")
            return exported(relation).to_arrow_table()
        results.append(_result(relation, statement.text, numbers, fetched if is_last else None))
    return promoted(results)


def _result(relation: Any, text: str, numbers: Numbers, last: FetchedRows | None) -> dict[str, Any]:
    columns = [] if relation is None else relation.columns
    is_query = text.lstrip("( \n\t").lower().startswith(("select", "with", "from", "values", "table"))
    if not columns or (columns in (["Count"], ["Success"]) and not is_query):
        rows = relation.fetchall() if columns else []
        count = int(rows[0][0]) if columns == ["Count"] and rows else 0
        return {"status": "ok", "row_count": count}

    def batches() -> Iterator[list[dict[str, Any]]]:
        count = 0
        for batch in exported(relation).to_arrow_reader(FETCHED):
            yield json_rows(batch, numbers, count)
            count += batch.num_rows

    return result_of_batches(batches(), columns, last)


_CASTS = {
    **dict.fromkeys(("TIME WITH TIME ZONE", "INTERVAL", "BIT", "BIGNUM"), "VARCHAR"),
    "UHUGEINT": "HUGEINT",
}
"""Types that Arrow has no type for, or that Arrow's readers lack, as the types in which rows leave DuckDB."""


def exported(relation: Any) -> Any:
    """Returns a relation whose values Arrow holds; raises ``ToolError`` if two columns have one name."""
    names = relation.columns
    check_names(names, "the result")
    casts = [_CASTS.get(str(kind)) for kind in relation.types]
    if not any(casts):
        return relation
    columns = (
        quoted(name) if cast is None else f"CAST({quoted(name)} AS {cast}) AS {quoted(name)}"
        for name, cast in zip(names, casts, strict=True)
    )
    return relation.project(", ".join(columns))


WAIT_SECONDS = 60.0  # for another process that has the file open
PAUSE_SECONDS = 0.1

# A part of a sink, or a transfer, is published once: a process that was assumed dead does not publish it again.
# position: of a transfer, as JSON; published is null before its end.
LEDGER = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.sink_part (target VARCHAR, part VARCHAR, published TIMESTAMPTZ DEFAULT now(),
                                            position VARCHAR, PRIMARY KEY (target, part));
"""

_preparing = threading.Lock()
"""Connections of one process that create the ledger at the same time would refuse each other."""


def open_file(path: str) -> duckdb.DuckDBPyConnection:
    """Opens a file with its ledger; waits while another process has it open.

    Raises:
        duckdb.Error: the other process has it for longer than a minute, or it is no DuckDB file.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection = duckdb.connect(path)
            break
        except duckdb.Error as error:
            if not is_held(error) or time.monotonic() > until:
                raise
            time.sleep(PAUSE_SECONDS)
    try:
        with _preparing:
            connection.execute(LEDGER)
    except BaseException:
        connection.close()
        raise
    return connection
