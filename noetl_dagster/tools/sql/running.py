"""Prepares the statements of a call, and runs them on a connection to PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.files import load_script
from noetl_dagster.tools.rows.values import column_converter, parameter
from noetl_dagster.tools.sql.statements import (
    BoundStatement,
    bind,
    needs_own_transaction,
    split_statements,
    without_percent,
)

Params = Mapping[str, Any] | Sequence[Any]
"""The parameters of a call: by name, or by number."""

SHAPES_KEPT = 512

ENCODED_THE_SAME = frozenset({"float4", "float8", "timestamp", "timestamptz", "date", "time"})
"""Types whose values the JSON encoder writes in the same way as :func:`column_converter` converts them."""

ENOUGH = 256
"""Rows that are fetched at first of a statement that has not run before."""


@dataclass(slots=True)
class Shape:
    """The server's description of a statement: the types of its parameters, and the columns that it returns.

    Attributes:
        types: of the columns, as the server names them.
        converters: of the columns whose values are no JSON values, and whether the JSON encoder writes them alike.
        rows: number of rows the last time; None before, and if they were too many to be held.
        repeatable: whether running it twice is the same as running it once; None while that is not known.
    """

    parameters: tuple[str, ...]
    columns: tuple[str, ...]
    types: tuple[str, ...]
    converters: tuple[tuple[str, Callable[[Any], Any], bool], ...]
    rows: int | None = None
    repeatable: bool | None = None

    @property
    def enough(self) -> int:
        """Rows to fetch at first, so that all arrive at once if they are about as many as the last time."""
        return max(ENOUGH, 2 * (self.rows or 0))

    @classmethod
    def of(cls, statement: Any) -> Shape:
        """Describes a prepared statement."""
        columns = [(column.name, column.type.name) for column in statement.get_attributes()]
        converters = [(name, kind, column_converter(kind)) for name, kind in columns]
        return cls(
            tuple(item.name for item in statement.get_parameters()),
            tuple(name for name, _ in columns),
            tuple(kind for _, kind in columns),
            tuple(
                (name, convert, kind in ENCODED_THE_SAME) for name, kind, convert in converters if convert is not None
            ),
        )


async def run_statements(
    connection: asyncpg.Connection,
    statements: Sequence[BoundStatement],
    shapes: dict[str, Shape] | None = None,
) -> dict[str, Any]:
    """Runs statements in one transaction, also an open one, if they allow it; returns the tool's result mapping."""
    shapes = {} if shapes is None else shapes
    several = len(statements) > 1 and not connection.is_in_transaction()
    together = several and not any(needs_own_transaction(statement.text) for statement in statements)
    async with connection.transaction() if together else nullcontext():
        return promoted(
            [await run_one(connection, statement, shapes, index) for index, statement in enumerate(statements)]
        )


def promoted(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the results of statements by name, together with the fields of the last one that returns rows."""
    named: dict[str, Any] = {f"command_{index}": result for index, result in enumerate(results)}
    last: dict[str, Any] = {}
    for result in results:
        if "rows" in result or "rows" not in last:
            last = result
    return named | {key: value for key, value in last.items() if key != "status"}


async def run_one(
    connection: asyncpg.Connection, statement: BoundStatement, shapes: dict[str, Shape], index: int
) -> dict[str, Any]:
    """Runs one statement, with its description from the cache if it is there."""
    shape = shapes.get(statement.text)
    if shape is None:
        prepared = await connection.prepare(statement.text)
        shape = Shape.of(prepared)
        remember(shapes, statement.text, shape)
        records = await prepared.fetch(*values_of(statement, shape, index))
        if not shape.columns:
            return {"status": "ok", "row_count": _affected(prepared.get_statusmsg())}
    elif shape.columns:
        records = await connection.fetch(statement.text, *values_of(statement, shape, index))
    else:
        message = await connection.execute(statement.text, *values_of(statement, shape, index))
        return {"status": "ok", "row_count": _affected(message)}
    if records and tuple(records[0].keys()) != shape.columns:  # select * of a table that was altered
        shape = Shape.of(await connection.prepare(statement.text))
        remember(shapes, statement.text, shape)
    return result_of(records, shape)


def result_of(records: Sequence[asyncpg.Record], shape: Shape) -> dict[str, Any]:
    """Returns the result of a statement that returns rows, and remembers their number."""
    shape.rows = len(records)
    rows = _converted(records, shape)
    return {"status": "ok", "rows": rows, "row_count": len(rows), "columns": list(shape.columns)}


def lines_of(records: Sequence[asyncpg.Record], shape: Shape) -> JsonLines:
    """Returns records as lines of the same JSON values as in :func:`result_of`."""
    rows = _converted(records, shape, for_encoder=True)
    return JsonLines(codec.json_lines(rows), len(rows), dict(zip(shape.columns, shape.types, strict=True)))


def _converted(records: Sequence[asyncpg.Record], shape: Shape, *, for_encoder: bool = False) -> list[dict[str, Any]]:
    rows = [dict(zip(shape.columns, record, strict=True)) for record in records]
    for name, convert, is_encoded in shape.converters:
        if not (for_encoder and is_encoded):
            for row in rows:
                row[name] = convert(row[name])
    return rows


def values_of(statement: BoundStatement, shape: Shape, index: int) -> list[Any]:
    """Converts the values of a statement's parameters; raises ``ToolError`` if one does not fit its type."""
    values = []
    for number, (value, type_name) in enumerate(zip(statement.values, shape.parameters, strict=True), 1):
        try:
            values.append(parameter(value, type_name))
        except ValueError as error:
            raise ToolError(f"command_{index}: parameter ${number}: {error}", kind="schema", code="22000") from None
    return values


def remember(shapes: dict[str, Shape], text: str, shape: Shape) -> None:
    """Adds a description to the cache, which forgets the oldest one when it is full."""
    if len(shapes) >= SHAPES_KEPT:
        shapes.pop(next(iter(shapes)))
    shapes[text] = shape


def _affected(message: str | None) -> int:
    """Returns the row count of a status such as ``INSERT 0 5`` or ``UPDATE 3``; 0 if there is none."""
    tail = (message or "").rpartition(" ")[2]
    return int(tail) if tail.isdigit() else 0


async def texts_of(call: ToolCall, context: ToolContext) -> tuple[list[str], Params]:
    """Returns the SQL of a call, of its script or its command, and its parameters."""
    params: Params = call.config.get("params") or call.input
    script = await load_script(call, context)
    command = script if script is not None else call.config.get("command")
    commands = command if isinstance(command, list | tuple) else [] if command is None else [command]
    return [str(item) for item in commands], params


def bound(call: ToolCall, params: Params, bind_all: Callable[[], list[BoundStatement]]) -> list[BoundStatement]:
    """Returns the bound statements of a call; raises ``ToolError`` without any, or if a parameter has no value."""
    try:
        statements = bind_all()
    except KeyError as error:
        raise call.error(f"no value for {error.args[0]}; 'params' has {len(params)} values") from None
    if not statements:
        raise ToolError(f"{call.task.kind} in step {call.step} has no SQL in 'command'", kind="schema")
    return statements


async def prepare_statements(call: ToolCall, context: ToolContext) -> list[BoundStatement]:
    """Reads, splits and binds the call's statements; raises ``ToolError`` as :func:`bound`."""
    texts, params = await texts_of(call, context)
    split = [statement for text in without_percent(texts, params) for statement in split_statements(text)]
    return bound(call, params, lambda: [bind(statement, params) for statement in split])


def wants_table(call: ToolCall, default: str = "rows") -> bool:
    """Returns whether a call asks for its rows as one table, by its field ``as``."""
    return str(call.config.get("as") or default).lower() in ("table", "arrow", "parquet")
