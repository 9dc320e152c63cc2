"""Files and objects as sources: Parquet by row groups, JSON lines, arrays and CSV by blocks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import duckdb
import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.cutters import RECORD_BYTES, begins_array
from noetl_dagster.tools.rows.files import RowWriter, read_file, row_writer
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.checksum import (
    Checksum,
    TableSums,
    compare_checksums,
    sum_of_given,
    sum_of_kept,
)
from noetl_dagster.tools.transfer.chunks import Chunk, Drift, ahead, threaded
from noetl_dagster.tools.transfer.options import Options, Place, Verify, data_files, object_place, open_folder
from noetl_dagster.tools.transfer.postgres_target import Outcome
from noetl_dagster.tools.transfer.text import (
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


class FolderSource:
    """The files of a folder one after another, by name; those whose names begin with ``_`` or ``.`` are none."""

    seeks = True

    def __init__(self, files: list[FileSource], identity: str) -> None:
        self._files, self._identity = files, identity
        self.bytes = sum(file.bytes for file in files)

    @classmethod
    async def of(cls, place: Place, call: ToolCall, box: Toolbox, size: int) -> FolderSource:
        """Raises ``ToolError`` where there is no such folder, or its files lie in folders below it."""
        folder = await open_folder(place, call, box)
        names, below = await data_files(folder)
        if below:
            raise ToolError(
                f"transfer in step {call.step}: source.path: {place.path} has folders, such as {below[0]}; a folder's "
                "own files are read: name one of them, or read all with a query of kind duckdb",
                kind="schema",
            )
        paths = [place.model_copy(update={"path": place.path + name}) for name in names]
        files = [await FileSource.of(path, call, box, size) for path in paths]
        known = [f"{name}:{await file.identity()}" for name, file in zip(names, files, strict=True)]
        return cls(files, hashlib.blake2b("\n".join(known).encode(), digest_size=16).hexdigest())

    async def identity(self) -> str:
        return self._identity

    async def chunks(self, after: Any = None) -> AsyncIterator[Chunk]:
        first, inner = (after["file"], after["after"]) if after is not None else (0, None)
        for number in range(first, len(self._files)):
            async for chunk in self._files[number].chunks(inner):
                there = None if chunk.after is None else {"file": number, "after": chunk.after}
                yield Chunk(chunk.data, there)
            inner = None


async def write_file(
    place: Place, chunks: AsyncIterator[Chunk], options: Options, call: ToolCall, box: Toolbox
) -> Outcome:
    """Writes a local file, then moves or uploads it as a whole: readers never see half of it."""
    if options.mode is not WriteMode.REPLACE:
        raise ToolError("transfer: an object can only be replaced; write mode: replace", kind="schema")
    format = row_format(place.format, place.path)
    store, key = await object_place(place, call, box)
    local = await asyncio.to_thread(new_file, None if store is not None else Path(key).parent)
    count, drift = 0, None
    try:
        checked = options.verify is Verify.CHECKSUM
        writer: ParquetTables | TextRows = (
            ParquetTables(local, checked) if format is RowFormat.PARQUET else TextRows(local, format, checked)
        )
        with contextlib.closing(writer):
            async for chunk in ahead(chunks):
                if drift is None:
                    drift = Drift(options.on_drift, f"the file {place.path}", chunk.columns)
                columns, _ = drift.sort(chunk.columns, str)
                await asyncio.to_thread(writer.write, chunk.only(columns))
                count += chunk.rows
        outcome = await asyncio.to_thread(_described, local, format, count, options.verify)
        if checked:
            kept = await asyncio.to_thread(writer.kept, options.size)
            compare_checksums(writer.read, kept, f"the file {place.path}", kind="storage")
            outcome.verified["sha256"], outcome.checksum = outcome.checksum, str(kept)
        if store is None:
            await asyncio.to_thread(local.replace, key)
        else:
            await obstore.put_async(store, key, local)
            if options.verify is not Verify.NONE:
                size = (await obstore.head_async(store, key))["size"]
                equal("bytes", outcome.verified["bytes"], size, place)
    finally:
        await asyncio.to_thread(local.unlink, missing_ok=True)
    outcome.drift = {} if drift is None else drift.report()
    return outcome


def _described(path: Path, format: RowFormat, count: int, verify: Verify) -> Outcome:
    """What a file holds, by its own account where it has one."""
    outcome = Outcome(count, count)
    if verify is Verify.NONE:
        return outcome
    if format is RowFormat.PARQUET:
        outcome.written = pq.read_metadata(path).num_rows
        equal("rows", count, outcome.written, path)
    with path.open("rb") as file:
        outcome.checksum = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    outcome.verified["bytes"] = path.stat().st_size
    return outcome


def equal(what: str, given: int, found: int, where: Any) -> None:
    if given != found:
        raise ToolError(
            f"transfer: {given} {what} were written to {where}, which has {found}", kind="storage"
        )


class TextRows:
    """Chunks as text of a format.

    Attributes:
        read: where ``checked``, the checksum of what was given.
    """

    def __init__(self, path: Path, format: RowFormat, checked: bool) -> None:
        self._path, self._format, self._checked = path, format, checked
        self._writer: RowWriter = row_writer(path, format)
        self.read = Checksum()

    def write(self, chunk: Chunk) -> None:
        rows = chunk.as_rows()
        self._writer.write(rows)
        if self._checked:
            self.read += sum_of_given(rows, self._format)

    def close(self) -> None:
        self._writer.close()

    def kept(self, size: int) -> Checksum:
        """The checksum of the rows in the file."""
        parts = read_file(self._path, self._format, size)
        return sum((sum_of_kept(rows, self._format) for rows in parts), Checksum())


class ParquetTables:
    """Parquet with the schema that is given, else of the first chunk; columns that are null there become text.

    Attributes:
        read: as of :class:`TextRows`.
        schema: known from the first chunk on.
    """

    def __init__(self, path: Path, checked: bool, schema: pa.Schema | None = None) -> None:
        self._path, self._checked = path, checked
        self._writer: pq.ParquetWriter | None = None
        self.schema = schema
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._sums = TableSums(duckdb.connect()) if checked else None
        self.read = Checksum()

    def write(self, chunk: Chunk) -> None:
        try:
            table = chunk.as_table(self.schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ToolError(
                f"rows of different types in one column: {error}; convert the column in the source",
                kind="schema",
            ) from None
        if self._writer is None:
            fields = [
                item.with_type(pa.string()) if pa.types.is_null(item.type) else item for item in table.schema
            ]
            self.schema = pa.schema(fields)
            table = table.cast(self.schema)
            texts = [item.name for item in self.schema if pa.types.is_string(item.type)]
            # of numbers and times it costs more than it saves
            self._writer = pq.ParquetWriter(
                self._path, self.schema, compression="zstd", use_dictionary=texts or False
            )
        if self._sums is not None:
            self.read += self._sums.of(table)
        self._waiting.append(table)
        self._rows += len(table)
        if self._rows >= ROWS_OF_A_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._waiting and self._writer is not None:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._rows = [], 0

    def close(self) -> None:
        if self._writer is None:
            pq.write_table(pa.table({}), self._path)
        else:
            self._flush()
            self._writer.close()

    def kept(self, size: int) -> Checksum:
        """The checksum of the rows in the file."""
        assert self._sums is not None
        with pq.ParquetFile(self._path) as file:
            tables = (pa.Table.from_batches([batch]) for batch in file.iter_batches(batch_size=size))
            return sum(map(self._sums.of, tables), Checksum())


ROWS_OF_A_GROUP = 100_000
"""Small groups make Parquet slow to read and large; a transfer that goes on skips whole ones."""


def new_file(folder: Path | None) -> Path:
    """An empty file beside the one that it will replace, readable to other workers; else a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".noetl-transfer-", dir=folder)
    os.fchmod(handle, 0o644)
    os.close(handle)
    return Path(name)


async def parquet_schema(folder: Place, name: str, call: ToolCall, box: Toolbox) -> pa.Schema:
    """The schema of a file in a folder."""
    file = await FileSource.of(folder.model_copy(update={"path": folder.path + name}), call, box, 1)
    return await asyncio.to_thread(file.schema)
