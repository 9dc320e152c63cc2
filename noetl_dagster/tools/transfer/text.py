"""CSV, JSON lines and JSON arrays as they come: blocks of bytes, cut where a row ends."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import csv as arrow_csv

from noetl_dagster.tools.rows.cutters import RECORD_BYTES, ArrayCutter
from noetl_dagster.tools.rows.files import Row
from noetl_dagster.tools.rows.parsing import Where, check_columns, csv_rows, json_rows, unnamed_columns
from noetl_dagster.tools.transfer.chunks import Chunk, sliced

BLOCK = 1 << 20
Blocks = AsyncIterator[bytes]


async def json_lines(blocks: Blocks, size: int, name: str, at: int = 0) -> AsyncIterator[Chunk]:
    """The rows of JSON lines; ``after`` is the number of bytes behind which the next line begins.

    Args:
        name: what errors call the file.
        at: where in the file the blocks begin.
    """
    async for block, where in _records(blocks, _last_line, name, at):
        rows = as_rows(await asyncio.to_thread(json_rows, block.split(b"\n"), where))
        async for chunk in sliced(rows, size, where.byte + len(block)):
            yield chunk


async def json_array(
    blocks: Blocks, size: int, name: str, at: int = 0, *, longest: int = RECORD_BYTES
) -> AsyncIterator[Chunk]:
    """The values of a JSON array; ``after`` says the ``byte`` behind which the next one begins, or the file ends."""
    cutter, ended = ArrayCutter(BLOCK, name=name, offset=at, longest=longest), at > 0
    async for block in blocks:
        ended = False
        for piece in await asyncio.to_thread(list, cutter.feed(block)):
            async for chunk in sliced(as_rows(piece.rows), size, {"byte": piece.offset}):
                yield chunk
    if not ended and (rest := cutter.end()) is not None:
        async for chunk in sliced(as_rows(rest.rows), size, {"byte": rest.offset}):
            yield chunk


async def csv_records(
    blocks: Blocks, size: int, name: str, columns: Sequence[str] | None = None, at: int = 0
) -> AsyncIterator[Chunk]:
    """The rows of CSV, whose values are text, empty ones null; ``after`` as of :func:`json_lines`, with the columns.

    Args:
        columns: where the blocks begin behind the header.
    """
    names = None if columns is None else list(columns)
    async for block, where in _records(blocks, _last_record, name, at):
        names, rows = await asyncio.to_thread(_of_csv, block, names, where)
        after = {"byte": where.byte + len(block), "columns": names}
        async for chunk in sliced(rows, size, after):
            yield chunk


async def _records(
    blocks: Blocks, last_end: Callable[[bytes], int], name: str, at: int
) -> AsyncIterator[tuple[bytes, Where]]:
    """Blocks that begin and end where a record does, each with where in the file it begins."""
    rest = b""
    async for block in blocks:
        rest += block
        end = last_end(rest)
        if end:
            yield rest[:end], Where(name, at)
            at += end
            rest = rest[end:]
        elif len(rest) > RECORD_BYTES:
            raise Where(name, at).never_ends(RECORD_BYTES, rest)
    if rest.strip():
        yield rest, Where(name, at)


def _last_line(block: bytes) -> int:
    return block.rfind(b"\n") + 1


def _last_record(block: bytes) -> int:
    """Behind the last line end that stands in no quotes."""
    open_quotes = block.count(b'"') % 2
    end = len(block)
    while end > 0:
        found = block.rfind(b"\n", 0, end)
        open_quotes ^= block.count(b'"', max(found, 0), end) % 2
        if found >= 0 and not open_quotes:
            return found + 1
        end = found
    return 0


def as_rows(values: list[Any]) -> list[Row]:
    return [value if isinstance(value, dict) else {"value": value} for value in values]


def _of_csv(block: bytes, columns: list[str] | None, where: Where) -> tuple[list[str] | None, Any]:
    """The columns, and an Arrow table of text."""
    if (broken := where.broken_quote(block)) is not None:
        raise broken
    names, skip = (columns, 0) if columns is not None else _header(block, where)
    text = pa.string()
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(block),
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=skip, use_threads=False),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, text),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:  # what says where, or reads it after all
        return csv_rows(block, columns, where)
    unnamed = unnamed_columns(names)
    if any(table.column(n).null_count < table.num_rows for n in unnamed):
        return csv_rows(block, columns, where)
    return names, table.select([n for n in range(len(names)) if n not in unnamed]) if unnamed else table


def _header(block: bytes, where: Where) -> tuple[list[str], int]:
    """The columns, and how many lines they take."""
    reader = csv.reader(io.StringIO(block.decode("utf-8-sig"), newline=""))
    names = next((row for row in reader if row), [])
    check_columns(names, where)
    return names, reader.line_num
