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
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.files import load_script
from noetl_dagster.tools.rows.columns import (
    Convert,
    all_finite,
    check_names,
    column_type,
    converted,
    finite,
    json_converter,
    moment_text,
)
from noetl_dagster.tools.rows.values import parameter
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

ENOUGH = 256
"""Rows that are fetched at first of a statement that has not run before."""


@dataclass(slots=True)
class Shape:
    """The server's description of a statement: the types of its parameters, and the columns that it returns.

    Attributes:
        types: of the columns, as the server names them.
        converters: of the columns whose values are no JSON values.
        rows: number of rows the last time; None before, and if they were too many to be held.
        repeatable: whether running it twice is the same as running it once; None while that is not known.
    """

    parameters: tuple[str, ...]
    columns: tuple[str, ...]
    types: tuple[str, ...]
    converters: Mapping[str, Convert]
    rows: int | None = None
    repeatable: bool | None = None

    @property
    def enough(self) -> int:
        """Rows to fetch at first, so that all arrive at once if they are about as many as the last time."""
        return max(ENOUGH, 2 * (self.rows or 0))

    @classmethod
    def of(cls, statement: Any, numbers: Numbers = Numbers.TEXT) -> Shape:
        """Describes a prepared statement; raises ``ToolError`` if two of its columns have one name."""
        columns = [(column.name, column.type.name) for column in statement.get_attributes()]
        check_names((name for name, _ in columns), "the result")
        converters = {name: convert for name, kind in columns if (convert := json_converter(kind, numbers)) is not None}
        return cls(
            tuple(item.name for item in statement.get_parameters()),
            tuple(name for name, _ in columns),
            tuple("float8" if kind == "numeric" and numbers is Numbers.FLOAT else kind for _, kind in columns),
            converters,
        )


class Shapes(dict[str, Shape]):
    """The descriptions of statements that ran on one server, by their text, for one form of decimal numbers."""

    def __init__(self, numbers: Numbers = Numbers.TEXT) -> None:
        super().__init__()
        self._numbers = numbers

    def add(self, text: str, statement: Any) -> Shape:
        """Describes a prepared statement as :meth:`Shape.of` does; forgets the oldest one if there are too many."""
        if len(self) >= SHAPES_KEPT:
            self.pop(next(iter(self)))
        shape = self[text] = Shape.of(statement, self._numbers)
        return shape


def numbers_of(call: ToolCall) -> Numbers:
    """Returns the form of decimal numbers that a call asks for: text, or doubles with ``numbers: float``."""
    word = str(call.config.get("numbers") or Numbers.TEXT).lower()
    if word not in (Numbers.TEXT, Numbers.FLOAT):
        raise call.error(f"numbers: {word!r} is unknown; write text or float")
    return Numbers(word)


async def run_statements(
    connection: asyncpg.Connection,
    statements: Sequence[BoundStatement],
    shapes: Shapes | None = None,
) -> dict[str, Any]:
    """Runs statements in one transaction, also an open one, if they allow it; returns the tool's result mapping."""
    shapes = Shapes() if shapes is None else shapes
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
    connection: asyncpg.Connection, statement: BoundStatement, shapes: Shapes, index: int
) -> dict[str, Any]:
    """Runs one statement, with its description from the cache if it is there."""
    shape = shapes.get(statement.text)
    if shape is None:
        prepared = await connection.prepare(statement.text)
        shape = shapes.add(statement.text, prepared)
        records = await prepared.fetch(*values_of(statement, shape, index))
        if not shape.columns:
            return {"status": "ok", "row_count": _affected(prepared.get_statusmsg())}
    elif shape.columns:
        records = await connection.fetch(statement.text, *values_of(statement, shape, index))
    else:
        message = await connection.execute(statement.text, *values_of(statement, shape, index))
        return {"status": "ok", "row_count": _affected(message)}
    if records and tuple(records[0].keys()) != shape.columns:  # select * of a table that was altered
        shape = shapes.add(statement.text, await connection.prepare(statement.text))
    return result_of(records, shape)


def result_of(records: Sequence[asyncpg.Record], shape: Shape) -> dict[str, Any]:
    """Returns the result of a statement that returns rows, and remembers their number."""
    shape.rows = len(records)
    rows = _rows(records, shape)
    return {"status": "ok", "rows": rows, "row_count": len(rows), "columns": list(shape.columns)}


def lines_of(records: Sequence[asyncpg.Record], shape: Shape, first: int = 0) -> JsonLines:
    """Returns records as lines of the same JSON values as in :func:`result_of`; ``first``: records before these."""
    types = dict(zip(shape.columns, shape.types, strict=True))
    rows = [dict(record.items()) for record in records]
    # the encoder writes most values as they are converted, and is much faster
    converters, moments = {}, False
    for name, convert in shape.converters.items():
        if column_type(types[name]).is_encoded and convert is column_type(types[name]).json:
            moments = moments or convert is moment_text
            if convert is not finite or all_finite([row[name] for row in rows]):
                continue
        converters[name] = convert
    lines = codec.json_lines(_converted(rows, converters, first))
    if moments and (b'"9999-12-31T' in lines or b'"0001-01-01T' in lines):  # which may be infinite
        lines = codec.json_lines(_rows(records, shape, first))
    return JsonLines(lines, len(records), types)


def _rows(records: Sequence[asyncpg.Record], shape: Shape, first: int = 0) -> list[dict[str, Any]]:
    return _converted([dict(record.items()) for record in records], shape.converters, first)


def _converted(rows: list[dict[str, Any]], converters: Mapping[str, Convert], first: int) -> list[dict[str, Any]]:
    for name, convert in converters.items():
        values = converted(name, [row[name] for row in rows], convert, first)
        for row, value in zip(rows, values, strict=True):
            row[name] = value
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
