"""Writes files of rows in Parquet, JSON lines, JSON and CSV, and makes Arrow tables of rows."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import AsyncIterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.rows.jsonable import to_jsonable
from noetl_dagster.tools.rows.values import row_value

Row = Mapping[str, Any]


class RowWriter(Protocol):
    """Writes chunks of rows to a file."""

    def write(self, rows: Sequence[Row]) -> None:
        """Writes rows."""

    def close(self) -> None:
        """Completes the file."""


def row_writer(path: Path, format: RowFormat, schema: pa.Schema | None = None) -> RowWriter:
    """Returns a writer of a file.

    Args:
        schema: of Parquet, if the first chunk does not show it.
    """
    match format:
        case RowFormat.PARQUET:
            return _ParquetRows(path, schema)
        case RowFormat.CSV:
            return _CsvRows(path)
        case _:
            return _JsonRows(path, lines=format is RowFormat.JSONL)


class _JsonRows:
    """JSON lines, or one JSON list with a row per line."""

    def __init__(self, path: Path, *, lines: bool) -> None:
        self._file = path.open("wb")
        self._lines = lines
        self._first = True
        if not lines:
            self._file.write(b"[\n")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not self._first:
                self._file.write(b"\n" if self._lines else b",\n")
            self._first = False
            self._file.write(orjson.dumps(json_row(row)))

    def close(self) -> None:
        self._file.write((b"" if self._first else b"\n") if self._lines else b"\n]\n")
        self._file.close()


class _CsvRows:
    """CSV with the columns of the first row; mappings and lists are JSON text, null is empty."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer: csv.DictWriter[str] | None = None

    def write(self, rows: Sequence[Row]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(rows[0]))
            self._writer.writeheader()
        for row in rows:
            plain = json_row(row)
            self._writer.writerow(
                {
                    name: json.dumps(item) if isinstance(item, dict | list) else item
                    for name, item in plain.items()
                }
            )

    def close(self) -> None:
        self._file.close()


class _ParquetRows:
    """Parquet with a given schema or that of the first chunk; columns that are null there become text."""

    def __init__(self, path: Path, schema: pa.Schema | None) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._schema = schema

    def write(self, rows: Sequence[Row]) -> None:
        table = arrow_rows(rows, self._schema)
        if self._writer is None:
            self._schema = table.schema
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is None:
            pq.write_table(pa.table({}), self._path)
        else:
            self._writer.close()


def arrow_rows(rows: Sequence[Row], schema: pa.Schema | None = None) -> pa.Table:
    """Returns rows as an Arrow table of the given schema, or of the schema that their values show.

    Numerics are doubles; identifiers, addresses and the like are text.

    Raises:
        ToolError: the rows do not fit the schema.
    """
    plain = [{name: _arrow_value(value) for name, value in row.items()} for row in rows]
    try:
        if schema is not None:
            return pa.Table.from_pylist(plain, schema=schema)
        table = _inferred(plain)
        return table.cast(_without_null(table.schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _mixed(error) from None


async def arrow_schema(batches: AsyncIterable[Sequence[Row]]) -> pa.Schema:
    """Returns the schema that the values of all rows show together, as :func:`arrow_rows` finds it.

    Raises:
        ToolError: the values of a column have no common type.
    """
    known = pa.schema([])
    async for rows in batches:
        known = await asyncio.to_thread(_widened, known, rows)
    return _without_null(known)


def _widened(known: pa.Schema, rows: Sequence[Row]) -> pa.Schema:
    """Returns a schema for rows and for earlier ones of a known schema."""
    plain = [{name: _arrow_value(value) for name, value in row.items()} for row in rows]
    try:
        return pa.unify_schemas([known, _inferred(plain).schema], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _mixed(error) from None


def _inferred(plain: Sequence[Row]) -> pa.Table:
    columns = dict.fromkeys(name for row in plain for name in row)  # not every row has every one
    return pa.table({name: [row.get(name) for row in plain] for name in columns})


def _without_null(schema: pa.Schema) -> pa.Schema:
    """Turns columns that are null in every row into text."""
    return pa.schema(
        [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema]
    )


def _mixed(error: Exception) -> ToolError:
    return ToolError(
        f"rows of different types in one column: {error}; convert the column in the source", kind="schema"
    )


def _arrow_value(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_arrow_value(item) for item in value]
    if isinstance(value, str | int | float | bytes | dict | None) or type(value).__module__ == "datetime":
        return value
    return row_value(value)


def json_row(row: Row) -> dict[str, Any]:
    """Returns a row with JSON values only."""
    return {name: to_jsonable(row_value(value), name) for name, value in row.items()}
