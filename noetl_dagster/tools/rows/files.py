"""Writes files of rows in Parquet, JSON lines, JSON and CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.tools.rows.arrow import Row, arrow_table, check_times, is_text, plain_rows, without_null
from noetl_dagster.tools.rows.formats import RowFormat


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
        self._rows = 0
        if not lines:
            self._file.write(b"[\n")

    def write(self, rows: Sequence[Row] | pa.Table) -> list[dict[str, Any]]:
        """Writes rows; returns them as they are written."""
        plain = plain_rows(rows, self._rows)
        for row in plain:
            if self._rows:
                self._file.write(b"\n" if self._lines else b",\n")
            self._rows += 1
            self._file.write(orjson.dumps(row))
        return plain

    def close(self) -> None:
        self._file.write((b"\n" if self._rows else b"") if self._lines else b"\n]\n")
        self._file.close()


class _CsvRows:
    """CSV with the columns of the first row; null is empty, and values other than text are JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer: csv.DictWriter[str] | None = None
        self._rows = 0

    def write(self, rows: Sequence[Row] | pa.Table) -> list[dict[str, Any]]:
        """Writes rows; returns them as they are written."""
        plain = plain_rows(rows, self._rows)
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(plain[0]))
            self._writer.writeheader()
        texts = [{name: csv_text(value) for name, value in row.items()} for row in plain]
        self._writer.writerows(texts)
        self._rows += len(plain)
        return texts

    def close(self) -> None:
        self._file.close()


def csv_text(value: Any) -> str | None:
    """Returns a JSON value as CSV has it."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


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
        self._rows = self._written = 0

    def write(self, rows: Sequence[Row] | pa.Table) -> pa.Table:
        """Writes rows as soon as they are enough for a row group; returns them as they are written."""
        table = arrow_table(rows, self.schema, first=self._written)
        check_times(table, self._written)
        self._written += len(table)
        if self._writer is None:
            self.schema = without_null(table.schema)
            table = table.cast(self.schema)
            # a dictionary of numbers or times costs more than it saves
            texts = [item.name for item in self.schema if is_text(item.type)]
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
