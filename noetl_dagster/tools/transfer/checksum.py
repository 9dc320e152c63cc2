"""Checksums of rows in any order, which compare the rows that were read with those that a target keeps.

PostgreSQL computes its own, by :func:`rows_digest`; this process computes those of Arrow tables and JSON rows. Each is
the sum of a hash of every row, so the checksums of parts add up to that of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import orjson
import pyarrow as pa

from noetl_dagster.errors import ErrorKind, ToolError
from noetl_dagster.tools.rows.arrow import Row, is_text
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sql.tables import listed, quoted

_DIGEST = "count(*) || ':' || coalesce(sum(('x' || left(md5({text}), 16))::bit(64)::bigint::numeric), 0)"

_LOST = {"lost": True}
"""Replaces a value that the format cannot hold, and equals no value that is read back."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of ``rows`` rows; the result shows its ``str``."""

    rows: int = 0
    total: int = 0

    @classmethod
    def of_text(cls, text: str) -> Checksum:
        """Parses the ``str`` of a checksum."""
        rows, total = text.split(":")
        return cls(int(rows), int(total))

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(self.rows + other.rows, self.total + other.total)

    def __str__(self) -> str:
        return f"{self.rows}:{self.total}"


def compare_checksums(read: object, written: object, where: str, *, kind: ErrorKind) -> None:
    """Raises ``ToolError`` if they differ; ``where`` names the target."""
    if str(read) != str(written):
        raise ToolError(
            f"transfer: the checksum of what was read is {read}, of what was written {written}: {where} changes "
            "values, by its types or a trigger. It is as it was. Convert the values in the source, or write "
            "verify: rows",
            kind=kind,
        )


def rows_digest(columns: Iterable[str], types: Mapping[str, str], value: Callable[[str], str] = quoted) -> str:
    """Returns SQL of the checksum of all rows, from their values that are not null, with column names and lengths.

    Args:
        types: the type of each value as in ``pg_type.typname``: 1.50 and 1.5 are one number.
        value: returns SQL of a column's value.
    """
    parts = []
    for name in sorted(columns):
        label = name.replace("'", "''")
        text = f"trim_scale({value(name)})::text" if types[name] == "numeric" else f"{value(name)}::text"
        parts.append(f"'{label}=' || length({text}) || ':' || {text}")
    return _DIGEST.format(text=f"array_to_string(ARRAY[{', '.join(parts)}]::text[], '')")


def sum_of_table(connection: duckdb.DuckDBPyConnection, table: pa.Table) -> Checksum:
    """Returns the checksum of an Arrow table; tables of the same columns, types and rows have the same.

    DuckDB computes it on a connection, which several threads may not share.
    """
    connection.register("noetl_rows", table)
    query = f"SELECT sum(hash({listed(sorted(table.column_names))})::HUGEINT) FROM noetl_rows"
    [(total,)] = connection.execute(query).fetchall()
    connection.unregister("noetl_rows")
    return Checksum(len(table), int(total or 0))


def as_read(stored: pa.Table, read: pa.Table, where: str) -> tuple[pa.Table, pa.Table]:
    """Casts the stored rows and those that were read to the types in which they were read, or raises ``ToolError``."""
    columns, others = [], []
    for field in read.schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        sent, written = read.column(field.name).cast(kind), stored.column(field.name)
        if pa.types.is_null(kind):
            kind, sent = written.type, sent.cast(written.type)
        try:
            if is_text(kind) and not is_text(written.type):
                raise pa.ArrowNotImplementedError
            columns.append(written.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ToolError(
                f"transfer: verify: checksum cannot compare column {field.name}, which was read as {kind} and is "
                f"{written.type} in {where}. It is as it was. Convert the column in the source, or write verify: rows",
                kind="schema",
            ) from None
        others.append(sent)
    names = read.column_names
    return pa.table(columns, names=names), pa.table(others, names=names)


def sum_of_written(rows: Iterable[Row], written: Iterable[Row], format: RowFormat) -> Checksum:
    """Returns the checksum of rows as they are written as text; a value that the format cannot hold equals nothing."""
    return _sum(_with_lost(*pair, format) for pair in zip(rows, written, strict=True))


def _with_lost(row: Row, written: Row, format: RowFormat) -> Row:
    values = {**written, **{name: _LOST for name, value in row.items() if _is_no_number(value)}}
    if format is not RowFormat.CSV:
        return values
    # empty text is read as null
    return {name: _LOST if value == "" else value for name, value in values.items() if value is not None}


def sum_of_kept(rows: Iterable[Row], format: RowFormat) -> Checksum:
    """Returns the checksum of rows that were read back from text of a format."""
    if format is RowFormat.CSV:
        return _sum({name: value for name, value in row.items() if value is not None} for row in rows)
    return _sum(rows)


def _sum(rows: Iterable[Row]) -> Checksum:
    count = total = 0
    for row in rows:
        text = orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        count += 1
    return Checksum(count, total)


def _is_no_number(value: Any) -> bool:
    if isinstance(value, float):
        return value != value
    if isinstance(value, dict):
        return any(map(_is_no_number, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_no_number, value))
