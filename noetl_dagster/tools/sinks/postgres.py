"""Sinks to PostgreSQL: each iteration's or attempt's result in a table.

If the sink fails, the iteration or attempt fails. If the table is in the event log's database, the rows and the
completion are written in one transaction.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.events.connection import host_addresses
from noetl_dagster.events.log import as_row
from noetl_dagster.events.queries import insert_new
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import Sink
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import postgres_arguments
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.batches import StoredResult, batches_of
from noetl_dagster.tools.rows.columns import converted
from noetl_dagster.tools.rows.values import bytes_of, parameter
from noetl_dagster.tools.sql.connection import NEVER_IDLE, POSTGRES_ERRORS, postgres_error
from noetl_dagster.tools.sql.running import run_statements
from noetl_dagster.tools.sql.statements import bind, split_statements, without_percent
from noetl_dagster.tools.sql.tables import (
    SqlTable,
    WriteMode,
    add_columns,
    conflict_clause,
    delete_rows,
    describe_table,
    drift_of_sink,
    kind_of_value,
    listed,
    type_of_kinds,
    upsert_key,
    write_mode,
)
from noetl_dagster.values import admit

ROWS_PER_STATEMENT = 5_000
KNOWN_SECONDS = 1.0

# quoted identifiers; the rows travel as one parameter, which the server converts to the types of the table
INSERT_ROWS = "INSERT INTO {table} ({columns}) SELECT {columns} FROM jsonb_populate_recordset(NULL::{table}, $1::jsonb)"

# take a whole row as JSON if none of its keys is a column
WHOLE_ROW_COLUMNS = ("data", "result", "payload", "value")

# rows and events in one round trip: the rows only if the log takes the last event
INSERT_WITH_EVENTS = """
WITH new AS ({events}), written AS ({rows} WHERE EXISTS (SELECT FROM new WHERE event_id = $2){conflict})
SELECT event_id FROM new
"""

_OFFSET = re.compile(r"\d\d:\d\d\S* ?(Z|[+-]\d\d(:?\d\d)?)$")

Complete = Callable[[asyncpg.Connection], Awaitable[Any]]


class CompletingEvents(ABC):
    """A completion that is nothing but events of one execution, the last of which decides."""

    @abstractmethod
    async def events(self) -> Sequence[Event]:
        """Returns the events."""

    @abstractmethod
    def check(self, new: Set[int]) -> None:
        """Raises ``ToolError`` if the last event is not among those that the log has taken."""

    @abstractmethod
    async def __call__(self, connection: asyncpg.Connection) -> None:
        """Writes the events in the transaction of a connection, or raises ``ToolError``."""


async def write_sink(
    context: ToolContext,
    sink: Sink,
    value: Any,
    scope: Mapping[str, Any],
    *,
    identity: Mapping[str, Any] | None = None,
    complete: Complete | None = None,
) -> bool:
    """Renders a sink's fields and writes one result; returns whether the completion is written, in one transaction.

    Args:
        value: the result; see :func:`batches_of`.
        scope: names for the sink's templates (``result``, ``output``, the iterator, ...).
        identity: columns that name the iteration; filled in if the table has them.
        complete: writes the completion on the connection it gets; called in the same transaction if the sink's
            database is the event log's.

    Raises:
        ToolError: the sink could not be written; neither its rows nor the completion remain.
    """
    if sink.tool != "postgres":
        raise ToolError(
            f"a sink of tool {sink.tool!r} is not supported; use postgres, or a task after this one",
            kind="schema",
        )
    fields = {name: getattr(sink, name) for name in ("table", "auth", "args", "command", "on_new_column")}
    ready = sink.model_copy(update=await render_async(compile_value(fields), scope, context.results.get))
    credential = await context.credentials.resolve(ready.auth, CredentialType.POSTGRES)
    if credential is None:
        raise CredentialError("the sink names no credential; write auth: <name of a postgres credential>")
    shared = complete is not None and is_event_log(credential, context.settings)
    pool = await context.clients.postgres(credential)
    tables = KnownTables(context.clients.statements(pool))

    async def write() -> None:
        async with pool.acquire() as connection:
            at_once = complete if shared and isinstance(complete, CompletingEvents) else None
            if at_once and await _write_at_once(connection, ready, value, identity or {}, tables, at_once):
                return
            async with connection.transaction():
                await write_result(connection, ready, value, identity or {}, tables)
                if shared and complete is not None:
                    await complete(connection)

    try:
        try:
            await write()
        except asyncpg.SyntaxOrAccessError:
            if not tables.forget(ready.table):
                raise
            await write()  # the table has changed since it was described
    except POSTGRES_ERRORS as error:
        raise postgres_error("sink", error) from None
    return shared


class KnownTables:
    """Descriptions of the tables of a server, each used for :data:`KNOWN_SECONDS`.

    Args:
        kept: where they are kept, with other facts about the server.
    """

    def __init__(self, descriptions: dict[str, Any] | None = None) -> None:
        self._kept = {} if descriptions is None else descriptions

    async def describe(self, connection: asyncpg.Connection, name: str, *, anew: bool = False) -> SqlTable:
        """Returns a description that may be as old as that, unless it is asked for ``anew``."""
        key = f"table {name}"
        described: tuple[float, SqlTable] | None = self._kept.get(key)
        if anew or described is None or time.monotonic() - described[0] >= KNOWN_SECONDS:
            described = self._kept[key] = (time.monotonic(), await describe_table(connection, name))
        return described[1]

    def forget(self, name: str | None) -> bool:
        """Forgets a table; returns whether it was known."""
        return self._kept.pop(f"table {name}", None) is not None


async def write_result(
    connection: asyncpg.Connection,
    sink: Sink,
    value: Any,
    identity: Mapping[str, Any],
    tables: KnownTables | None = None,
) -> None:
    """Writes one result on an open connection, inside the caller's transaction.

    ``sink`` has no templates. With ``command``, its statements run with ``args`` bound by name. With ``table``, the
    rows are ``args`` (one row, or a list of rows) if given, else those of the result; columns that the table lacks are
    added or left out if ``on_new_column`` says so. ``mode: replace`` first deletes
    the rows of the same identity, or all rows if the table has none of its columns. A missing column of a row is null.
    With ``mode: upsert`` the last of several rows with the same key wins.

    Raises:
        ToolError: for a sink without table and command, unknown columns, or a missing upsert key.
    """
    if isinstance(value, StoredResult):
        await connection.execute(NEVER_IDLE)
    if sink.command is not None:
        whole = await value.whole() if isinstance(value, StoredResult) else value
        params = {**identity, "result": whole, **sink.args}
        [command] = without_percent([sink.command], params)
        statements = [bind(statement, params) for statement in split_statements(command)]
        await run_statements(connection, statements)
        return
    if not sink.table:
        raise ToolError("a sink needs 'table' or 'command'", kind="schema")
    tables = KnownTables() if tables is None else tables
    mode = write_mode(sink.mode)
    table = await tables.describe(connection, sink.table)

    async def batches() -> AsyncIterator[list[dict[str, Any]]]:
        async for rows in batches_of(sink.args or value):
            yield _rows_for(table, rows, identity)

    async def kinds_of_columns() -> dict[str, set[str]]:
        kinds: dict[str, set[str]] = {}
        async for rows in batches():
            for row in rows:
                for name, item in row.items():
                    kinds_here = kinds.setdefault(name, set())
                    if item is not None and name not in table.columns:
                        kinds_here.add(kind_of_value(item))
        return kinds

    kinds = await kinds_of_columns()
    if not kinds.keys() <= table.columns.keys():
        table = await tables.describe(connection, sink.table, anew=True)
        kinds = await kinds_of_columns()
    drift = drift_of_sink(sink.on_new_column, f"table {table.name}", table.columns)
    columns, new = drift.sort(list(kinds), lambda name: type_of_kinds(kinds[name]))
    if kinds and not columns:
        known_names = ", ".join(table.columns)
        raise ToolError(f"table {table.name}: the rows have none of its columns: {known_names}", kind="schema")
    if new:  # first, since it takes the table's strongest lock
        tables.forget(sink.table)
        await add_columns(connection, table, new)
    if mode is WriteMode.REPLACE:
        own = {name: item for name, item in identity.items() if name in table.columns}
        await delete_rows(connection, table, own)
    async for rows in batches():
        statement = INSERT_ROWS.format(table=table.name, columns=listed(columns))
        if mode is WriteMode.UPSERT:
            keys = upsert_key(table, sink.key)
            statement += conflict_clause(keys, columns)
            rows = _last_of_each(rows, keys)
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            some = rows[start : start + ROWS_PER_STATEMENT]
            await connection.execute(statement, [admit(row, "a row") for row in some])


async def _write_at_once(
    connection: asyncpg.Connection,
    sink: Sink,
    value: Any,
    identity: Mapping[str, Any],
    tables: KnownTables,
    complete: CompletingEvents,
) -> bool:
    """Writes a few rows and the events of the completion in one statement; False if it takes several."""
    if not sink.table or sink.command is not None or isinstance(value, StoredResult):
        return False
    mode = write_mode(sink.mode)
    if mode is WriteMode.REPLACE:
        return False
    table = await tables.describe(connection, sink.table)
    rows = [row async for batch in batches_of(sink.args or value) for row in _rows_for(table, batch, identity)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns or len(rows) > ROWS_PER_STATEMENT or not table.columns.keys() >= set(columns):
        return False
    conflict = ""
    if mode is WriteMode.UPSERT:
        keys = upsert_key(table, sink.key)
        conflict, rows = conflict_clause(keys, columns), _last_of_each(rows, keys)
    statement = INSERT_WITH_EVENTS.format(
        events=insert_new(first=4, condition="noetl.is_open($3::bigint)"),
        rows=INSERT_ROWS.format(table=table.name, columns=listed(columns)),
        conflict=conflict,
    )
    written = [admit(row, "a row") for row in rows]
    events = await complete.events()
    arrays = [list(column) for column in zip(*map(as_row, events), strict=True)]
    last = events[-1]
    written_events = await connection.fetch(statement, written, last.event_id, last.execution_id, *arrays)
    complete.check({record["event_id"] for record in written_events})
    return True


def _rows_for(table: SqlTable, rows: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns rows as they fit a table, with the columns that name the iteration."""
    own = {name: item for name, item in identity.items() if name in table.columns}
    fitting = [{**own, **_fitting(row, table.columns)} for row in rows]
    for name, kind in table.columns.items():
        if kind in ("bytea", "date", "timestamp"):
            values = converted(name, [row.get(name) for row in fitting], partial(_as_parameter, kind))
            for row, value in zip(fitting, values, strict=True):
                if name in row:
                    row[name] = value
    return fitting


def _as_parameter(kind: str, value: Any) -> Any:
    """Returns text of bytes, or of a time with an offset, with its meaning as a parameter."""
    if kind == "bytea":
        return f"\\x{bytes_of(value).hex()}" if isinstance(value, str) else value
    return str(parameter(value, kind)) if isinstance(value, str) and _OFFSET.search(value) else value


def _last_of_each(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    return list({tuple(map(repr, map(row.get, keys))): row for row in rows}.values())


def _fitting(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the row, or the whole of it in one column if the table has none of its keys but a column for it."""
    if any(name in columns for name in row):
        return row
    for name in WHOLE_ROW_COLUMNS:
        if columns.get(name) in ("json", "jsonb"):
            return {name: row.get("value") if row.keys() == {"value"} else dict(row)}
    return row


def is_event_log(credential: Credential, settings: Settings) -> bool:
    """Returns whether a credential is for the database of the event log: same hosts, ports and database."""
    if settings.db_url is None:
        return False
    return _server(postgres_arguments(credential)) == _server({"dsn": settings.db_url})


def _server(arguments: Mapping[str, Any]) -> tuple[set[tuple[str, int]], str]:
    dsn = arguments.get("dsn")
    if dsn is None:
        database = arguments.get("database") or arguments.get("user") or ""
        return {(_host(str(arguments["host"])), int(arguments["port"]))}, str(database)
    hosts = [urlsplit(address) for address in host_addresses(dsn)]
    first = hosts[0]
    places = {(_host(one.hostname or ""), one.port or 5432) for one in hosts}
    return places, first.path.lstrip("/") or (first.username or "")


def _host(name: str) -> str:
    return "127.0.0.1" if name in ("localhost", "::1") else name.lower()
