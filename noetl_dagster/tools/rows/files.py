"""Writes files of rows in Parquet, JSON lines, JSON and CSV, and makes Arrow tables of rows."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.rows.values import row_value
from noetl_dagster.values import admit

Row = Mapping[str, Any]


def row_writer(
    path: Path, format: RowFormat, schema: pa.Schema | None = None, group_rows: int = 0
) -> ParquetRows | _CsvRows | _JsonRows:
    """Returns a writer of a file, with the methods ``write`` and ``close``.

    Args:
        schema: of Parquet, if the first rows do not show it.
        group_rows: rows of a row group of Parquet at least.
    """
    match format:
        case RowFormat.PARQUET:
            return ParquetRows(path, schema, group_rows)
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
                {name: json.dumps(item) if isinstance(item, dict | list) else item for name, item in plain.items()}
            )

    def close(self) -> None:
        self._file.close()


class ParquetRows:
    """Parquet with a given schema or that of the first rows; columns that are null there become text.

    Attributes:
        schema: None before the first rows.
    """

    def __init__(self, path: Path, schema: pa.Schema | None, group_rows: int) -> None:
        self.schema = schema
        self._path, self._group_rows = path, group_rows
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def write(self, rows: Sequence[Row] | pa.Table) -> pa.Table:
        """Writes rows as soon as they are enough for a row group; returns them as they are written."""
        table = arrow_table(rows, self.schema)
        if self._writer is None:
            self.schema = _without_null(table.schema)
            table = table.cast(self.schema)
            # a dictionary of numbers or times costs more than it saves
            texts = [item.name for item in self.schema if pa.types.is_string(item.type)]
            self._writer = pq.ParquetWriter(self._path, self.schema, compression="zstd", use_dictionary=texts or False)
        self._waiting.append(table)
        self._rows += len(table)
        if self._rows >= self._group_rows:
            self._flush()
        return table

    def _flush(self) -> None:
        if self._waiting and self._writer is not None:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._rows = [], 0

    def close(self) -> None:
        """Completes the file."""
        if self._writer is None:
            pq.write_table(pa.table({}), self._path)
        else:
            self._flush()
            self._writer.close()


def arrow_table(rows: Sequence[Row] | pa.Table, schema: pa.Schema | None = None) -> pa.Table:
    """Returns rows as an Arrow table of the given schema, or of the schema that their values show.

    Numerics are doubles; identifiers, addresses and the like are text. Columns that a table lacks are null.

    Raises:
        ToolError: the rows do not fit the schema.
    """
    with _one_type_a_column():
        if isinstance(rows, pa.Table):
            return rows if schema is None else _fitted(rows, schema)
        if schema is not None:
            return pa.Table.from_pylist(_arrow_values(rows), schema=schema)
        table = _inferred(rows)
        return table.cast(_without_null(table.schema))


async def arrow_schema(batches: AsyncIterable[Sequence[Row]]) -> pa.Schema:
    """Returns the schema of all rows together; raises ``ToolError`` if the values of a column have no common type."""
    schema = pa.schema([])
    async for rows in batches:
        schema = await asyncio.to_thread(_widened, schema, rows)
    return _without_null(schema)


def _widened(schema: pa.Schema, rows: Sequence[Row]) -> pa.Schema:
    """Returns a schema for rows and for earlier ones of a known schema."""
    with _one_type_a_column():
        return pa.unify_schemas([schema, _inferred(rows).schema], promote_options="permissive")


@contextmanager
def _one_type_a_column() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ToolError(
            f"rows of different types in one column: {error}; convert the column in the source", kind="schema"
        ) from None


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _inferred(rows: Sequence[Row]) -> pa.Table:
    plain = _arrow_values(rows)
    columns = dict.fromkeys(name for row in plain for name in row)  # not every row has every one
    return pa.table({name: [row.get(name) for row in plain] for name in columns})


def is_text(kind: pa.DataType) -> bool:
    """Returns whether an Arrow type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _without_null(schema: pa.Schema) -> pa.Schema:
    """Turns columns that are null in every row into text."""
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema])


def _arrow_values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{name: _arrow_value(value) for name, value in row.items()} for row in rows]


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
    return {name: admit(row_value(value), name) for name, value in row.items()}
