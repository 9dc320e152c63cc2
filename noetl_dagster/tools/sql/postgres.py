"""``kind: postgres``: SQL with bound parameters, one transaction a task, rows as JSON values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.tools.access.credentials import CredentialType
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.limits import time_limit
from noetl_dagster.tools.rows.values import column_converter, parameter
from noetl_dagster.tools.scripts import sql_text
from noetl_dagster.tools.sql.percent import without_percent
from noetl_dagster.tools.sql.statements import BoundStatement, bind, needs_own_transaction, split_statements

SHAPES_KEPT = 512
RETRYABLE_CLASSES = ("08", "40", "53")  # connection, transaction rollback, insufficient resources
RETRYABLE_STATES = frozenset(
    {"55P03", "57P01", "57P02", "57P03"}
)  # lock not available, server going or coming

Params = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the server said about a statement: its parameters' types, and the columns it returns."""

    parameters: tuple[str, ...]
    columns: tuple[str, ...]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]

    @property
    def returns_rows(self) -> bool:
        return bool(self.columns)

    @classmethod
    def of(cls, statement: Any) -> Shape:
        columns = statement.get_attributes()
        converters = [(column.name, column_converter(column.type.name)) for column in columns]
        return cls(
            tuple(item.name for item in statement.get_parameters()),
            tuple(column.name for column in columns),
            tuple((name, convert) for name, convert in converters if convert is not None),
        )


class PostgresTool(Tool):
    """Runs SQL.

    Input: ``auth`` (a postgres credential), ``command`` (text with one or more statements, or a list of
    them) or ``script``; ``params`` (default: the task's ``input``): a mapping binds ``:name``, a list
    ``$1, $2, ...``, and psycopg's ``%(name)s`` and ``%s`` mean the same; ``timeout`` seconds.

    Output: ``command_0``, ``command_1``, ... each ``{status, rows, row_count, columns}`` or
    ``{status, row_count}``; ``rows``, ``row_count`` and ``columns`` of the last one that returns rows stand
    beside them. Numerics are numbers where exact, else text; dates and times ISO 8601; bytea base64.

    With ``chunk_size``, the rows of the one statement are read through a cursor, so many at a time, and the
    result is a Parquet table by reference; for results that memory should not hold.

    All statements are one transaction, unless one cannot be in a transaction block (VACUUM, CREATE DATABASE,
    CALL, ...) or steers transactions itself. Errors carry ``pg.sqlstate``.
    """

    kind = "postgres"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        if call.config.get("chunk_size"):
            from noetl_dagster.tools.sql.stream import stream_rows

            async with time_limit(call):
                return ToolResult(ref=await stream_rows(call, box, int(call.config["chunk_size"])))
        statements = await prepare_statements(call, box)
        async with time_limit(call):
            try:
                return ToolResult(data=await self._run(call, box, statements))
            except asyncpg.InvalidCachedStatementError:
                # another session changed a table; nothing was done, and the caches are fresh now
                box.clients.statements(await open_pool(call, box)).clear()
                return ToolResult(data=await self._run(call, box, statements))

    async def _run(self, call: ToolCall, box: Toolbox, statements: list[BoundStatement]) -> dict[str, Any]:
        with postgres_errors(call, box):
            pool = await open_pool(call, box)
            shapes = box.clients.statements(pool)
            async with pool.acquire() as connection:
                return await run_statements(connection, statements, shapes)


async def open_pool(call: ToolCall, box: Toolbox) -> asyncpg.Pool:
    """The pool of the call's postgres credential.

    Raises:
        ToolError: when no fitting credential is named.
    """
    auth = call.auth if call.auth is not None else call.config.get("credential")
    try:
        credential = await box.credentials.resolve(auth, CredentialType.POSTGRES)
        if credential is None:
            raise CredentialError("no credential is named; write auth: <name of a postgres credential>")
        return await box.clients.postgres(credential)
    except CredentialError as error:
        raise ToolError(f"{call.task.kind} in step {call.step}: {error}", kind="credential") from None


async def prepare_statements(call: ToolCall, box: Toolbox) -> list[BoundStatement]:
    """The call's statements with their parameters placed.

    Raises:
        ToolError: without any statement, and for a ``$n`` that has no value.
    """
    params: Params = call.config.get("params") or call.input
    texts = without_percent(await sql_text(call, box), params)
    statements = [statement for text in texts for statement in split_statements(text)]
    if not statements:
        raise ToolError(f"{call.task.kind} in step {call.step} has no SQL in 'command'", kind=call.task.kind)
    try:
        return [bind(statement, params) for statement in statements]
    except KeyError as error:
        raise ToolError(
            f"{call.task.kind} in step {call.step}: no value for {error.args[0]}; "
            f"'params' has {len(params)} values",
            kind=call.task.kind,
        ) from None


async def run_statements(
    connection: asyncpg.Connection,
    statements: Sequence[BoundStatement],
    shapes: dict[str, Shape] | None = None,
) -> dict[str, Any]:
    """Runs statements in one transaction where they allow it; gives the tool's result mapping.

    A transaction that is already open on the connection is used as it is.
    """
    shapes = {} if shapes is None else shapes
    several = len(statements) > 1 and not connection.is_in_transaction()
    if several and not any(needs_own_transaction(statement.text) for statement in statements):
        async with connection.transaction():
            return await _run_each(connection, statements, shapes)
    return await _run_each(connection, statements, shapes)


async def _run_each(
    connection: asyncpg.Connection, statements: Sequence[BoundStatement], shapes: dict[str, Shape]
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for index, statement in enumerate(statements):
        result = await _run_one(connection, statement, shapes, index)
        results[f"command_{index}"] = result
        if "rows" in result or "rows" not in last:
            last = result
    results.update({key: value for key, value in last.items() if key != "status"})
    return results


async def _run_one(
    connection: asyncpg.Connection, statement: BoundStatement, shapes: dict[str, Shape], index: int
) -> dict[str, Any]:
    shape = shapes.get(statement.text)
    if shape is None:
        prepared = await connection.prepare(statement.text)
        shape = Shape.of(prepared)
        _remember(shapes, statement.text, shape)
        records = await prepared.fetch(*_values(statement, shape, index))
        if not shape.returns_rows:
            return {"status": "ok", "row_count": _affected(prepared.get_statusmsg())}
    elif shape.returns_rows:
        records = await connection.fetch(statement.text, *_values(statement, shape, index))
    else:
        message = await connection.execute(statement.text, *_values(statement, shape, index))
        return {"status": "ok", "row_count": _affected(message)}
    if records and tuple(records[0].keys()) != shape.columns:  # select * of a table that was altered
        shape = Shape.of(await connection.prepare(statement.text))
        _remember(shapes, statement.text, shape)
    rows = rows_of(records, shape)
    return {"status": "ok", "rows": rows, "row_count": len(rows), "columns": list(shape.columns)}


def rows_of(records: Sequence[asyncpg.Record], shape: Shape) -> list[dict[str, Any]]:
    """Records as mappings of JSON values."""
    rows = [dict(record) for record in records]
    for name, convert in shape.converters:
        for row in rows:
            row[name] = convert(row[name])
    return rows


def _values(statement: BoundStatement, shape: Shape, index: int) -> list[Any]:
    values = []
    for number, (value, type_name) in enumerate(
        zip(statement.values, shape.parameters, strict=True), start=1
    ):
        try:
            values.append(parameter(value, type_name))
        except ValueError as error:
            raise ToolError(
                f"command_{index}: parameter ${number}: {error}", kind="postgres", code="22000"
            ) from None
    return values


def _remember(shapes: dict[str, Shape], text: str, shape: Shape) -> None:
    if len(shapes) >= SHAPES_KEPT:
        shapes.pop(next(iter(shapes)))
    shapes[text] = shape


def _affected(message: str | None) -> int:
    """The row count of a status such as ``INSERT 0 5`` or ``UPDATE 3``; 0 where there is none."""
    tail = (message or "").rpartition(" ")[2]
    return int(tail) if tail.isdigit() else 0


@contextlib.contextmanager
def postgres_errors(call: ToolCall, box: Toolbox) -> Any:
    """Turns errors of asyncpg and of the connection into ``ToolError`` of kind ``postgres``."""
    where = f"postgres in step {call.step}"
    try:
        yield
    except asyncpg.InvalidCachedStatementError:
        raise
    except asyncpg.PostgresError as error:
        raise postgres_error(where, error, box.credentials.redact) from None
    except (TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        lost = not isinstance(error, asyncpg.InterfaceError) or "connection" in str(error).lower()
        message = box.credentials.redact(f"{where}: {type(error).__name__}: {error}")
        raise ToolError(
            message, kind="postgres", retryable=lost, details={"pg": {"sqlstate": None}}
        ) from None


def postgres_error(where: str, error: asyncpg.PostgresError, redact: Callable[[str], str]) -> ToolError:
    """The server's message with its SQLSTATE, detail and hint."""
    state = error.sqlstate or ""
    parts = [str(error.args[0]) if error.args else type(error).__name__]
    parts += [f"{name}: {text}" for name in ("detail", "hint") if (text := getattr(error, name, None))]
    return ToolError(
        redact(f"{where}: {'; '.join(parts)} (SQLSTATE {state})"),
        kind="postgres",
        retryable=is_retryable_state(state),
        code=state,
        details={"pg": {"sqlstate": state, "code": state}},
    )


def is_retryable_state(sqlstate: str) -> bool:
    """Connection loss, serialisation, deadlock, lack of resources, a server that is stopping or starting."""
    return sqlstate.startswith(RETRYABLE_CLASSES) or sqlstate in RETRYABLE_STATES
