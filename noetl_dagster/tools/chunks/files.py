"""Files of rows in a mount or a store of objects, read chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError, ToolError
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.chunks.result import ChunkedResult
from noetl_dagster.tools.rows.arrays import begins_array, cutter_for
from noetl_dagster.tools.rows.cut import CUT_FORMATS, RECORD_BYTES
from noetl_dagster.tools.rows.formats import RowFormat

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

CHUNKED_FORMATS = CUT_FORMATS | {RowFormat.PARQUET}
_READ_BYTES = 1 << 20
_LOOK = 1024  # bytes that show what a file is
_BATCH_ROWS = 1024


async def file_rows(uri: str, format: RowFormat, call: ToolCall, box: Toolbox) -> ToolResult:
    """The rows of a file: a list, of Parquet a table; by reference where they are more than a chunk.

    After a restart it is read from where the stored chunks end, unless it has changed; then they are compared.

    Args:
        format: one of ``CHUNKED_FORMATS``.

    Raises:
        StorageError: it is not there, or cannot be read.
        ToolError: it is not of the format, or has changed.
    """
    chunks = ChunkedResult(call, box)
    if not await chunks.seek():
        return await chunks.result()
    file = await asyncio.to_thread(_opened, uri, box)
    try:
        if chunks.position is not None and chunks.position["version"] != file.version:
            await chunks.begin_again()
        # of a file that nobody has asked to take apart a value may be all there is
        longest = RECORD_BYTES if call.config.get("format") or chunks.wanted else file.size
        at = chunks.position or {}
        found = file.tables(at) if format is RowFormat.PARQUET else file.pieces(format, at, longest)
        while True:
            with reading(uri):
                chunk = await asyncio.to_thread(next, found, None)
            if chunk is None:
                break
            await chunks.put(chunk)
        return await chunks.result()
    finally:
        await asyncio.to_thread(file.close)


def holds_array(uri: str, box: Toolbox, *, at_least: int) -> bool:
    """Whether a file begins as a JSON array does, and has so many bytes."""
    file = _opened(uri, box)
    try:
        return file.size >= at_least and begins_array(file.beginning(_LOOK))
    finally:
        file.close()


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Lets a block read a file whose content is the playbook's business.

    Raises:
        StorageError: it cannot be read.
        ToolError: it is not what its name says, or is damaged.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{uri} cannot be read: {error}") from error
    except ValueError as error:  # of Arrow and of JSON
        raise ToolError(
            f"{uri} is not what its name or 'format' says, or is damaged: {error}", kind="parse"
        ) from error


def _opened(uri: str, box: Toolbox) -> _File:
    with reading(uri):
        return _File(uri, box)


class _File:
    """An open file.

    Attributes:
        size: in bytes.
        version: another one when its bytes have changed: its size and when it was written.
    """

    def __init__(self, uri: str, box: Toolbox) -> None:
        self._uri = uri
        self._chunk_bytes = box.settings.chunk_bytes
        self._filesystem, path = locations.arrow_filesystem(box.settings, uri)
        info = self._filesystem.get_file_info(path)
        if not info.is_file:
            raise ReferenceNotAvailableError(f"no file is at {uri}")
        self.size: int = info.size
        self.version = f"{info.size}-{info.mtime_ns}"
        self._file = self._filesystem.open_input_file(path)

    def close(self) -> None:
        self._file.close()

    def beginning(self, size: int) -> bytes:
        return bytes(self._file.read(size))

    def pieces(self, format: RowFormat, position: dict[str, Any], longest: int) -> Iterator[Gathered]:
        """The chunks of a file of text, from the bytes that a position names."""
        cutter = cutter_for(format, self._chunk_bytes, position, self._uri, longest=longest)
        self._file.seek(position.get("offset", 0))
        while data := self._file.read(_READ_BYTES):
            for piece in cutter.feed(data):
                at = {"version": self.version, "offset": piece.offset, "columns": cutter.columns}
                yield Gathered(piece.rows, at)
        if (rest := cutter.end()) is not None:
            yield Gathered(rest.rows, full=False)

    def tables(self, position: dict[str, Any]) -> Iterator[Gathered]:
        """The chunks of a Parquet file, from the row that a position names."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        gathering = Gathering(self._chunk_bytes)
        row = position.get("row", 0)
        file = pq.ParquetFile(self._file, pre_buffer=False)
        if file.metadata.num_rows == 0:
            yield Gathered(file.schema_arrow.empty_table(), full=False)
        for batch in self._batches(file, row):
            row += batch.num_rows
            table = pa.Table.from_batches([batch])
            yield from gathering.add(table, {"version": self.version, "row": row})
        if (rest := gathering.rest()) is not None:
            yield rest

    def _batches(self, file: pq.ParquetFile, start: int) -> Iterator[pa.RecordBatch]:
        """The batches from a row on; groups of rows before it are not read."""
        metadata, group = file.metadata, 0
        while group < metadata.num_row_groups and metadata.row_group(group).num_rows <= start:
            start -= metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, metadata.num_row_groups))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups):
            skipped = min(start, batch.num_rows)
            start -= skipped
            if skipped < batch.num_rows:
                yield batch.slice(skipped)
