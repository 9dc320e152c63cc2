"""Stored rows laid down as files that DuckDB reads, one part in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.playbook.templates.sql_filters import sql_literal
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage.reading import ResultReader

FILE_ROWS = 20_000
"""Rows of a Parquet file that is made of JSON."""

LINES_BYTES = 3 * 512 * 1024
"""Bytes of a file of JSON lines, about: each thread of DuckDB holds the file that it reads."""

LINE_BYTES = 16 * 1024**2
"""Room for a line of JSON at least. DuckDB reserves no less, and touches what the file has."""

_LOOK = 64 * 1024
"""Bytes that are looked through for the end of a line at a time."""

TYPES = {
    **dict.fromkeys(("int2", "int4", "int8", "oid"), "BIGINT"),
    **dict.fromkeys(("float4", "float8"), "DOUBLE"),
    **dict.fromkeys(
        ("text", "varchar", "bpchar", "name", "citext", "uuid", "inet", "cidr", "xml"), "VARCHAR"
    ),
    **dict.fromkeys(("timestamp", "timestamptz", "date", "time", "timetz", "bytea"), "VARCHAR"),
    "bool": "BOOLEAN",
}
"""Types of PostgreSQL whose JSON values are all of one type of DuckDB, so that it reads the lines itself."""

MakeTable = Callable[[list[Any]], pa.Table]


@dataclass(frozen=True, slots=True)
class Files:
    """Files of rows on this machine.

    Attributes:
        columns: in their order; the types of DuckDB where the files are JSON lines, None where they are Parquet.
        largest: bytes of the largest file of lines; no line is longer.
    """

    paths: Sequence[Path]
    columns: Mapping[str, str | None]
    largest: int = 0

    @property
    def select(self) -> str:
        """The statement that gives their rows."""
        paths = "[" + ", ".join(str(sql_literal(str(path))) for path in self.paths) + "]"
        names = ", ".join(map(_quoted, self.columns))
        types = {name: kind for name, kind in self.columns.items() if kind is not None}
        if not types:
            return f"SELECT {names} FROM read_parquet({paths}, union_by_name = true)"
        fields = ", ".join(f"{_quoted(name)}: {sql_literal(kind)}" for name, kind in types.items())
        options = f"format = 'newline_delimited', maximum_object_size = {max(LINE_BYTES, self.largest)}"
        return f"SELECT {names} FROM read_json({paths}, {options}, columns = {{{fields}}})"


async def laid_down(results: ResultReader, ref: ResultRef, folder: Path, table: MakeTable) -> Files | None:
    """The rows of a stored list as files in a folder; None where there are none.

    Args:
        table: makes a table of rows that are JSON values.
    """
    types = _types(ref)
    if types is not None:
        return await _lines(results, ref, folder, types)
    columns: dict[str, pa.DataType] = {}
    paths: list[Path] = []
    async for found in _tables(results, ref, table):
        for field in found.schema:
            if columns.get(field.name, pa.null()) == pa.null():
                columns[field.name] = field.type
        paths.append(folder / f"{ref.ref_id}-{len(paths)}.parquet")
        known = [field.name for field in found.schema if field.type != pa.null()]
        await asyncio.to_thread(pq.write_table, _typed(found.select(known)), paths[-1], compression="lz4")
    empty = {name: pa.array([], pa.int32()) for name, kind in columns.items() if kind == pa.null()}
    if empty:
        paths.append(folder / f"{ref.ref_id}-null.parquet")
        await asyncio.to_thread(pq.write_table, pa.table(empty), paths[-1])
    return Files(paths, dict.fromkeys(columns)) if columns else None


def _types(ref: ResultRef) -> dict[str, str] | None:
    """Types of DuckDB for the columns of lines; None where the values have to be seen."""
    kinds = ref.extra.get("columns")
    if ref.kind is not RefKind.MANIFEST or not kinds or not all(kind in TYPES for kind in kinds.values()):
        return None
    return {name: TYPES[kind] for name, kind in kinds.items()}


async def _lines(results: ResultReader, ref: ResultRef, folder: Path, types: Mapping[str, str]) -> Files:
    """The lines as they are, cut anew: a part may be larger than a file should be, or much smaller."""
    with _LineFiles(folder, str(ref.ref_id)) as files:
        async for part in results.parts(ref):
            async for piece in results.stream(part):
                await asyncio.to_thread(files.write, memoryview(piece))
    return Files(files.paths, types, files.largest)


class _LineFiles:
    """Files of whole lines, each ending with the line that fills it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = None
        self._size = 0
        self.paths: list[Path] = []
        self.largest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def write(self, piece: memoryview) -> None:
        """Writes what follows, which may begin and end within a line."""
        while piece:
            if self._file is None:
                self.paths.append(self._folder / f"{self._name}-{len(self.paths)}.jsonl")
                self._file = self.paths[-1].open("wb")
            end = _line_end(piece, LINES_BYTES - self._size)
            self._file.write(piece[:end])
            self._size += len(piece[:end])
            self.largest = max(self.largest, self._size)
            if end is None:
                return
            self._close()
            piece = piece[end:]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._size = None, 0


def _line_end(piece: memoryview, start: int) -> int | None:
    """Where the first line ends that ends after ``start`` bytes; None where none does."""
    for at in range(max(0, start - 1), len(piece), _LOOK):
        found = bytes(piece[at : at + _LOOK]).find(b"\n")
        if found >= 0:
            return at + found + 1
    return None


async def _tables(results: ResultReader, ref: ResultRef, table: MakeTable) -> AsyncIterator[pa.Table]:
    rows: list[Any] = []
    async for batch in results.batches(ref):
        if not isinstance(batch, list):
            yield pa.Table.from_batches([batch])
            continue
        rows += batch
        if len(rows) >= FILE_ROWS:
            yield await asyncio.to_thread(table, rows)
            rows = []
    if rows:
        yield await asyncio.to_thread(table, rows)


def _typed(table: pa.Table) -> pa.Table:
    """A table that has a column at least, so that its rows are counted."""
    return table if table.num_columns else pa.table({"": pa.nulls(table.num_rows, pa.int32())})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
