"""Runs statements on a connection to PostgreSQL, with rows as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.values import column_converter, parameter
from noetl_dagster.tools.sql.statements import BoundStatement, needs_own_transaction

SHAPES_KEPT = 512


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
                f"command_{index}: parameter ${number}: {error}", kind="schema", code="22000"
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
