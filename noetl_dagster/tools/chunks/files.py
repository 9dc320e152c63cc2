"""Files of rows as the result of a call: chunk by chunk, from the position where an earlier run of the call ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import PurePosixPath
from typing import Any, cast

from noetl_dagster.errors import FormatError, StorageError, ToolError
from noetl_dagster.storage import codec
from noetl_dagster.storage.compression import one_format
from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.rows.cutters import RECORD_BYTES, ArrayCutter, RowCutter, cutter_for
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.rows.reader import RowFile, cut, threaded

_BATCH_ROWS = 1024


def value_of(content: bytes, name: str, call: ToolCall) -> Any:
    """Returns the value that a file holds, by the ending of its name: parsed JSON, a table, text, or the bytes.

    Raises:
        FormatError: the file has another format than its name.
        ToolError: it is JSON with a number that would change.
    """
    ending = PurePosixPath(name).suffix.lower()
    if ending == ".json":
        try:
            with one_format(codec.JSON):
                return loads_exact(content, call.word("numbers", Numbers, Numbers.EXACT))
        except FormatError as error:
            if isinstance(error.__cause__, InexactNumberError):
                raise call.error(f"{name}: {error.__cause__}", "parse") from None
            raise
    if ending == ".parquet":
        return codec.decode(content, codec.PARQUET)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


async def file_rows(
    open_file: Callable[[], Awaitable[RowFile]], name: str, format: RowFormat, call: ToolCall, context: ToolContext
) -> ToolResult:
    """Returns the rows of a file: a list, of Parquet a table; by reference if they are more than a chunk.

    After a restart, reading resumes after the stored chunks. If the file has changed, it is read again and compared
    with them.

    Args:
        open_file: finds the file; not called if all chunks are stored.
        name: of the file, for errors.
    """
    chunks = ChunkedResult(call, context)
    if not await chunks.seek():
        return await chunks.result()
    file = await open_file()
    if chunks.position is not None and chunks.position["version"] != file.version:
        await chunks.begin_again()
    if format is RowFormat.PARQUET:
        chunks_of_file = threaded(_tables(file, chunks.position or {}, chunks.most_bytes))
    else:
        # if the playbook does not ask for rows, one value may be the whole file
        is_one_value = format is RowFormat.JSON and not call.config.get("format") and not chunks.wanted
        longest = file.size if is_one_value else RECORD_BYTES
        numbers = call.word("numbers", Numbers, Numbers.EXACT)
        cutter = cutter_for(
            format, chunks.most_bytes, chunks.position or {}, file.name, longest=longest, numbers=numbers
        )
        chunks_of_file = _pieces(file, cutter, chunks.position or {})
    async with aclosing(cast(Any, chunks_of_file)) as stream:
        while True:
            with reading(name):
                chunk = await anext(stream, None)
            if chunk is None:
                return await chunks.result()
            await chunks.put(chunk)


async def _pieces(file: RowFile, cutter: RowCutter | ArrayCutter, position: dict[str, Any]) -> AsyncIterator[Gathered]:
    """Yields the chunks of a file of text, from a position on."""
    async for piece in cut(file.blocks(position.get("offset", 0)), cutter):
        after = {"version": file.version, "offset": piece.offset, "columns": cutter.columns}
        yield Gathered(piece.rows, after if piece.full else None, full=piece.full)


def _tables(file: RowFile, position: dict[str, Any], size: int) -> Iterator[Gathered]:
    """Yields the chunks of a Parquet file, from a position on; an empty table if the file has no rows."""
    import pyarrow as pa

    gathering = Gathering(size)
    after = start = position.get("row", 0)
    for batch, after in file.parquet_batches(start, _BATCH_ROWS, pre_buffer=False):
        yield from gathering.add(pa.Table.from_batches([batch]), {"version": file.version, "row": after})
    if (rest := gathering.rest()) is not None:
        yield rest
    elif after == 0:
        yield Gathered(file.parquet_schema().empty_table(), full=False)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns errors of reading into ``StorageError``, and those of damaged or other files into ``ToolError``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{name} cannot be read: {error}") from error
    except ValueError as error:  # of Arrow and of JSON
        raise ToolError(
            f"{name} is not what its name or 'format' says, or is damaged: {error}", kind="parse"
        ) from error
