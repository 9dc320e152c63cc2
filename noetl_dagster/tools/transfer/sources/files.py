"""Files and objects as sources: Parquet by row groups, JSON lines, arrays and CSV by blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.arrays import begins_array
from noetl_dagster.tools.rows.cut import RECORD_BYTES
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.transfer.chunks import Chunk, threaded
from noetl_dagster.tools.transfer.places import Place, object_place
from noetl_dagster.tools.transfer.sources.text import (
    BLOCK,
    Blocks,
    as_rows,
    csv_records,
    json_array,
    json_lines,
)

READ_AT_ONCE = 8 << 20
"""Bytes of an object that are asked for at a time where it is not read as a stream."""


class FileSource:
    """A file, or an object where it lies: nothing of it is copied first."""

    seeks = True

    def __init__(self, place: Place, store: Any, key: str, size: int) -> None:
        self._format = row_format(place.format, place.path)
        self._named = bool(place.format)
        self._store, self._key, self._size, self._name = store, key, size, place.path
        self.bytes = 0
        self._identity = ""

    @classmethod
    async def of(cls, place: Place, call: ToolCall, box: Toolbox, size: int) -> FileSource:
        source = cls(place, *await object_place(place, call, box), size)
        if source._store is None:
            found = await asyncio.to_thread(Path(source._key).stat)
            source.bytes, source._identity = found.st_size, f"{found.st_size}:{found.st_mtime_ns}"
        else:
            meta = await obstore.head_async(source._store, source._key)
            source.bytes = meta["size"]
            source._identity = f"{meta['size']}:{meta['e_tag'] or meta['last_modified']}"
        return source

    async def identity(self) -> str:
        return self._identity

    def schema(self) -> pa.Schema:
        """Of a Parquet file."""
        with pq.ParquetFile(self._opened()) as file:
            return file.schema_arrow.remove_metadata()

    def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        match self._format:
            case RowFormat.PARQUET:
                return threaded(self._parquet(after or 0))
            case RowFormat.JSONL:
                return json_lines(self._blocks(after or 0), self._size, self._name, after or 0)
            case RowFormat.CSV:
                if after is None:
                    return csv_records(self._blocks(0), self._size, self._name)
                start = after["byte"]
                return csv_records(self._blocks(start), self._size, self._name, after["columns"], start)
            case RowFormat.JSON:
                return self._json(after)

    def _parquet(self, done: int) -> Iterator[Chunk]:
        """From a row on; row groups before it are not read."""
        with pq.ParquetFile(self._opened(), pre_buffer=True) as file:
            first, before = 0, 0
            while first < file.num_row_groups:
                rows = file.metadata.row_group(first).num_rows
                if before + rows > done:
                    break
                first, before = first + 1, before + rows
            groups = list(range(first, file.num_row_groups))
            for batch in file.iter_batches(batch_size=self._size, row_groups=groups):
                table = pa.Table.from_batches([batch])
                if before < done:
                    table = table.slice(done - before)
                before += batch.num_rows
                if len(table):
                    yield Chunk(table, before)

    def _opened(self) -> Any:
        if self._store is None:
            return self._key
        reader = obstore.open_reader(self._store, self._key, buffer_size=READ_AT_ONCE)
        return pa.PythonFile(_Ranges(reader), mode="r")

    async def _blocks(self, start: int) -> Blocks:
        if self._store is not None:
            if start >= self.bytes:
                return
            options: Any = {"range": {"offset": start}}
            answer = await obstore.get_async(self._store, self._key, options=options)
            async for part in answer.stream(min_chunk_size=BLOCK):
                yield bytes(part)
            return
        with await asyncio.to_thread(Path(self._key).open, "rb") as file:
            file.seek(start)
            while block := await asyncio.to_thread(file.read, BLOCK):
                yield block

    async def _json(self, after: Any) -> AsyncIterator[Chunk]:
        """The values of an array; another value is one row."""
        start = 0 if after is None else after["byte"]
        async with aclosing(cast(Any, self._blocks(0))) as looking:
            is_array = start > 0 or begins_array(await anext(looking, b""))
        if is_array:
            longest = RECORD_BYTES if self._named else self.bytes
            async for chunk in json_array(
                self._blocks(start), self._size, self._name, start, longest=longest
            ):
                yield chunk
            return
        whole = b"".join([block async for block in self._blocks(0)])
        yield Chunk(as_rows([await asyncio.to_thread(orjson.loads, whole)]), {"byte": len(whole)})


class _Ranges:
    """An object as the file that Arrow reads."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        return bytes(self._reader.read(None if size < 0 else size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    def size(self) -> int:
        return int(self._reader.size())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def flush(self) -> None: ...
