"""Reads files of rows from a position: on this machine, in a mount, or in a bucket."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noetl_dagster.errors import ReferenceNotAvailableError
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.rows.cutters import ArrayCutter, Piece, RowCutter, begins_array, cutter_for
from noetl_dagster.tools.rows.formats import RowFormat

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

BLOCK_BYTES = 1 << 20  # that are read at a time
OBJECT_BUFFER_BYTES = 8 << 20  # of an object that is not read as a stream
_BEGINNING_BYTES = 1024  # enough to recognise an array


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows. Every reading opens it anew.

    Attributes:
        name: for errors.
        size: in bytes.
        version: changes when the bytes change.
    """

    name: str
    size: int
    version: str
    _opened: Callable[[], Any]
    _store: Any = None
    _key: str = ""

    @classmethod
    def at(cls, uri: str, settings: Settings) -> RowFile:
        """Finds a file in a mount or object store of the settings, or raises ``ReferenceNotAvailableError``."""
        filesystem, path = locations.arrow_filesystem(settings, uri)
        info = filesystem.get_file_info(path)
        if not info.is_file:
            raise ReferenceNotAvailableError(f"no file is at {uri}")
        version = f"{info.size}-{info.mtime_ns}"
        return cls(uri, info.size, version, lambda: filesystem.open_input_file(path))

    @classmethod
    async def of(cls, name: str, store: Any, key: str) -> RowFile:
        """Finds an object of an obstore store, or without a store the file of this machine at the path ``key``."""
        import obstore
        import pyarrow as pa

        if store is None:
            facts = await asyncio.to_thread(Path(key).stat)
            return cls(name, facts.st_size, f"{facts.st_size}:{facts.st_mtime_ns}", lambda: pa.OSFile(key))
        meta = await obstore.head_async(store, key)
        version = f"{meta['size']}:{meta['e_tag'] or meta['last_modified']}"

        def opened() -> Any:
            reader = obstore.open_reader(store, key, buffer_size=OBJECT_BUFFER_BYTES)
            return pa.PythonFile(_ObjectFile(reader), mode="r")

        return cls(name, meta["size"], version, opened, store, key)

    async def is_array(self) -> bool:
        """Returns whether the file can be a JSON array."""

        def beginning() -> bytes:  # in one thread, so that a cancellation closes no file that is being read
            with self._opened() as file:
                return bytes(file.read(_BEGINNING_BYTES))

        return begins_array(await asyncio.to_thread(beginning))

    async def blocks(self, offset: int = 0) -> AsyncIterator[bytes]:
        """Reads the bytes from an offset on; an object is read as one stream."""
        if self._store is not None:
            import obstore

            if offset < self.size:
                options: Any = {"range": {"offset": offset}}
                response = await obstore.get_async(self._store, self._key, options=options)
                async for part in response.stream(min_chunk_size=BLOCK_BYTES):
                    yield bytes(part)
            return
        with await asyncio.to_thread(self._opened) as file:
            file.seek(offset)
            while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
                yield block

    def parquet_schema(self) -> pa.Schema:
        """Returns the schema of a Parquet file."""
        import pyarrow.parquet as pq

        with self._opened() as file:
            return pq.ParquetFile(file).schema_arrow

    def parquet_batches(self, start: int, rows: int, *, pre_buffer: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Reads a Parquet file from a row on, without the row groups before it.

        Args:
            rows: of a batch at most.
            pre_buffer: read ahead, which takes the memory of whole row groups.

        Yields:
            A batch, and the number of the row after it.
        """
        import pyarrow.parquet as pq

        with self._opened() as source:
            file = pq.ParquetFile(source, pre_buffer=pre_buffer)
            group, at = 0, 0
            while group < file.num_row_groups and at + file.metadata.row_group(group).num_rows <= start:
                at += file.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, file.num_row_groups))
            for batch in file.iter_batches(rows, row_groups=groups):
                skipped = min(max(start - at, 0), batch.num_rows)
                at += batch.num_rows
                if skipped < batch.num_rows:
                    yield batch.slice(skipped), at


async def cut(blocks: AsyncIterator[bytes], cutter: RowCutter | ArrayCutter) -> AsyncIterator[Piece]:
    """Cuts and parses blocks in a thread."""
    async for block in blocks:
        for piece in await asyncio.to_thread(list, cutter.feed(block)):
            yield piece
    if (rest := await asyncio.to_thread(cutter.end)) is not None:
        yield rest


def read_written(path: Path, format: RowFormat) -> Iterator[list[Any]]:
    """Reads a file of text that this process has written, however long its records are."""
    cutter = cutter_for(format, BLOCK_BYTES, {}, str(path), longest=path.stat().st_size, numbers=Numbers.FLOAT)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            for piece in cutter.feed(block):
                yield piece.rows
    if (rest := cutter.end()) is not None:
        yield rest.rows


async def threaded(items: Iterable[T]) -> AsyncIterator[T]:
    """Takes each item in a thread."""
    iterator, nothing = iter(items), object()
    while (item := await asyncio.to_thread(next, iterator, nothing)) is not nothing:
        yield item  # type: ignore[misc]


class _ObjectFile(io.RawIOBase):
    """An object as the file that Arrow reads."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(self._reader.read(None if size < 0 else size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())
