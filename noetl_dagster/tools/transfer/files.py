"""Files, objects and folders of files as sources; a file or an object as a target."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import hashlib
import io
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.cutters import RECORD_BYTES, cutter_for
from noetl_dagster.tools.rows.files import Row, RowWriter, row_writer
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.rows.parsing import BlockOrigin, check_columns, csv_rows, unnamed_columns
from noetl_dagster.tools.rows.reader import BLOCK_BYTES, RowFile, cut, read_written, threaded
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.checksum import (
    Checksum,
    TableSums,
    compare_checksums,
    sum_of_given,
    sum_of_kept,
)
from noetl_dagster.tools.transfer.chunks import Drift, Transfer, TransferChunk, TransferOutcome, ahead, sliced
from noetl_dagster.tools.transfer.options import ObjectFolder, TransferEnd, Verify, open_object


class FileSource:
    """A file or an object, read in place."""

    seeks = True

    def __init__(self, file: RowFile, end: TransferEnd, size: int) -> None:
        self._file, self._size = file, size
        self._format = end.file_format
        # if the playbook does not name the format, one value of an array may be the whole file
        self._longest = RECORD_BYTES if end.format else file.size
        self.bytes = file.size

    @classmethod
    async def of(cls, end: TransferEnd, call: ToolCall, box: Toolbox, size: int) -> FileSource:
        """Finds a file; its chunks have at most ``size`` rows."""
        return cls(await RowFile.of(end.path, *await open_object(end, call, box)), end, size)

    async def identity(self) -> str:
        """Returns the version of the file."""
        return self._file.version

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows, from a position on."""
        file, position = self._file, after or {}
        if self._format is RowFormat.PARQUET:
            batches = file.parquet_batches(position.get("row", 0), self._size, pre_buffer=True)
            async for batch, row in threaded(batches):
                yield TransferChunk(pa.Table.from_batches([batch]), {"row": row})
        elif self._format is RowFormat.JSON and not position and not await file.is_array():
            whole = b"".join([block async for block in file.blocks()])
            yield TransferChunk(as_rows([await asyncio.to_thread(orjson.loads, whole)]), _END)
        else:
            blocks = file.blocks(position.get("offset", 0))
            rows = text_chunks(blocks, self._format, self._size, file.name, position, longest=self._longest)
            async for chunk in rows:
                yield chunk


_END = {"end": True}
"""The position after the last row of a text."""


async def text_chunks(
    blocks: AsyncIterator[bytes],
    format: RowFormat,
    size: int,
    name: str,
    position: Mapping[str, Any] = MappingProxyType({}),
    *,
    longest: int = RECORD_BYTES,
) -> AsyncIterator[TransferChunk]:
    """Yields the rows of JSON lines, CSV or a JSON array in chunks of at most ``size``.

    Args:
        name: for errors.
        position: where the blocks begin, if not at the beginning of the text.
        longest: bytes that a value of an array may have.
    """
    if position == _END:
        return
    cutter = cutter_for(format, BLOCK_BYTES, dict(position), name, longest=longest, parse_csv=csv_table)
    async for piece in cut(blocks, cutter):
        rows = as_rows(piece.rows) if isinstance(piece.rows, list) else piece.rows
        after = {"offset": piece.offset, "columns": cutter.columns} if piece.full else _END
        async for chunk in sliced(rows, size, after):
            yield chunk


def as_rows(values: list[Any]) -> list[Row]:
    """Returns values as rows; one that is no mapping becomes ``{"value": value}``."""
    return [value if isinstance(value, dict) else {"value": value} for value in values]


def csv_table(
    block: bytes, columns: Sequence[str] | None, origin: BlockOrigin, encoding: str = "utf-8"
) -> tuple[list[str] | None, Any]:
    """Parses CSV as :func:`csv_rows` does, into an Arrow table of text, which takes a tenth of the time."""
    if (broken := origin.broken_quote(block)) is not None:
        raise broken
    names, skipped = (list(columns), 0) if columns is not None else _header(block, origin)
    text = pa.string()
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(block),
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=skipped, use_threads=False),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, text),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:  # csv_rows finds the place of the error, or reads the block after all
        return csv_rows(block, columns, origin, encoding)
    unnamed = unnamed_columns(names)
    if any(table.column(n).null_count < table.num_rows for n in unnamed):
        return csv_rows(block, columns, origin, encoding)
    return names, table.select([n for n in range(len(names)) if n not in unnamed]) if unnamed else table


def _header(block: bytes, origin: BlockOrigin) -> tuple[list[str], int]:
    """Returns the columns, and the number of lines that the header takes."""
    reader = csv.reader(io.StringIO(block.decode("utf-8-sig"), newline=""))
    names = next((row for row in reader if row), [])
    check_columns(names, origin)
    return names, reader.line_num


class FolderSource:
    """The files of a folder one after another, by name, except those whose names begin with ``_`` or ``.``."""

    seeks = True

    def __init__(self, files: list[FileSource], identity: str) -> None:
        self._files, self._identity = files, identity
        self.bytes = sum(file.bytes for file in files)

    @classmethod
    async def of(cls, end: TransferEnd, call: ToolCall, box: Toolbox, size: int) -> FolderSource:
        """Raises ``ToolError`` if there is no such folder, or if there are folders in it."""
        folder = await ObjectFolder.open(end, call, box)
        names, below = await folder.data_files()
        if below:
            raise ToolError(
                f"transfer in step {call.step}: source.path: {end.path} has folders, such as {below[0]}; a folder's "
                "own files are read: name one of them, or read all with a query of kind duckdb",
                kind="schema",
            )
        files = [await FileSource.of(end.file(name), call, box, size) for name in names]
        known = [f"{name}:{await file.identity()}" for name, file in zip(names, files, strict=True)]
        return cls(files, hashlib.blake2b("\n".join(known).encode(), digest_size=16).hexdigest())

    async def identity(self) -> str:
        """Returns a digest of the names and versions of the files."""
        return self._identity

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows, from a position on."""
        first, inner = (after["file"], after["after"]) if after is not None else (0, None)
        for number in range(first, len(self._files)):
            async for chunk in self._files[number].chunks(inner):
                there = None if chunk.after is None else {"file": number, "after": chunk.after}
                yield TransferChunk(chunk.data, there)
            inner = None


async def parquet_schema(end: TransferEnd, call: ToolCall, box: Toolbox) -> pa.Schema:
    """Returns the schema of a Parquet file."""
    file = await RowFile.of(end.path, *await open_object(end, call, box))
    return (await asyncio.to_thread(file.parquet_schema)).remove_metadata()


async def write_file(transfer: Transfer) -> TransferOutcome:
    """Writes a local file, then moves or uploads it as a whole: readers never see a part of it."""
    target, options = transfer.target, transfer.options
    if options.mode is not WriteMode.REPLACE:
        raise ToolError("transfer: an object can only be replaced; write mode: replace", kind="schema")
    store, key = await open_object(target, transfer.call, transfer.box)
    local = await asyncio.to_thread(new_file, None if store is not None else Path(key).parent)
    count, drift = 0, None
    try:
        checked = options.verify is Verify.CHECKSUM
        writer = chunk_writer(local, target.file_format, checked)
        with contextlib.closing(writer):
            async for chunk in ahead(transfer.chunks()):
                if drift is None:
                    drift = Drift(options.on_drift, f"the file {target.path}", chunk.columns)
                columns, _ = drift.sort(chunk.columns, str)
                await asyncio.to_thread(writer.write, chunk.only(columns))
                count += chunk.rows
        outcome = await asyncio.to_thread(_described, local, target.file_format, count, options.verify)
        if checked:
            kept = await asyncio.to_thread(writer.kept, options.size)
            compare_checksums(writer.read, kept, f"the file {target.path}", kind="storage")
            outcome.verified["sha256"], outcome.checksum = outcome.checksum, str(kept)
        if store is None:
            await asyncio.to_thread(local.replace, key)
        else:
            size = outcome.verified.get("bytes") if options.verify is not Verify.NONE else None
            await upload(store, key, local, target.path, size)
    finally:
        await asyncio.to_thread(local.unlink, missing_ok=True)
    outcome.drift = {} if drift is None else drift.report()
    return outcome


async def upload(store: Any, key: str, path: Path, name: str, size: int | None) -> None:
    """Uploads a file, and compares the size of the object if one is given."""
    await obstore.put_async(store, key, path)
    if size is not None:
        compare("bytes", size, (await obstore.head_async(store, key))["size"], name)


def _described(path: Path, format: RowFormat, count: int, verify: Verify) -> TransferOutcome:
    """Returns the rows, bytes and hash of a file; Parquet reports its own number of rows."""
    outcome = TransferOutcome(count, count)
    if verify is Verify.NONE:
        return outcome
    if format is RowFormat.PARQUET:
        outcome.written = pq.read_metadata(path).num_rows
        compare("rows", count, outcome.written, path)
    with path.open("rb") as file:
        outcome.checksum = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    outcome.verified["bytes"] = path.stat().st_size
    return outcome


def compare(unit: str, given: int, found: int, name: Any) -> None:
    """Raises ``ToolError`` if a file does not hold as much as was written."""
    if given != found:
        raise ToolError(f"transfer: {given} {unit} were written to {name}, which has {found}", kind="storage")


def chunk_writer(
    path: Path, format: RowFormat, checked: bool, schema: pa.Schema | None = None
) -> ParquetTables | TextRows:
    """Returns a writer of chunks to a file; ``schema``: of Parquet, see :class:`ParquetTables`."""
    if format is RowFormat.PARQUET:
        return ParquetTables(path, checked, schema)
    return TextRows(path, format, checked)


class TextRows:
    """Chunks as text of a format.

    Attributes:
        read: if ``checked``, the checksum of the rows.
    """

    def __init__(self, path: Path, format: RowFormat, checked: bool) -> None:
        self._path, self._format, self._checked = path, format, checked
        self._writer: RowWriter = row_writer(path, format)
        self.read = Checksum()

    def write(self, chunk: TransferChunk) -> None:
        """Writes the rows of a chunk."""
        rows = chunk.as_rows()
        self._writer.write(rows)
        if self._checked:
            self.read += sum_of_given(rows, self._format)

    def close(self) -> None:
        """Completes the file."""
        self._writer.close()

    def kept(self, size: int) -> Checksum:
        """Returns the checksum of the rows in the file."""
        parts = read_written(self._path, self._format)
        return sum((sum_of_kept(rows, self._format) for rows in parts), Checksum())


class ParquetTables:
    """Parquet with the given schema, else that of the first chunk; columns that are null there become text.

    Attributes:
        read: as of :class:`TextRows`.
        schema: None before the first chunk.
    """

    def __init__(self, path: Path, checked: bool, schema: pa.Schema | None = None) -> None:
        self._path, self._checked = path, checked
        self._writer: pq.ParquetWriter | None = None
        self.schema = schema
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._sums = TableSums(duckdb.connect()) if checked else None
        self.read = Checksum()

    def write(self, chunk: TransferChunk) -> None:
        """Writes the rows of a chunk, as soon as they are enough for a row group."""
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
            # a dictionary of numbers or times costs more than it saves
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
        """Completes the file."""
        if self._writer is None:
            pq.write_table(pa.table({}), self._path)
        else:
            self._flush()
            self._writer.close()

    def kept(self, size: int) -> Checksum:
        """Returns the checksum of the rows in the file."""
        assert self._sums is not None
        with pq.ParquetFile(self._path) as file:
            tables = (pa.Table.from_batches([batch]) for batch in file.iter_batches(batch_size=size))
            return sum(map(self._sums.of, tables), Checksum())


ROWS_OF_A_GROUP = 100_000
"""Small row groups make Parquet large and slow to read; a transfer that resumes skips whole ones."""


def new_file(folder: Path | None) -> Path:
    """Creates an empty file that other workers can read: in a folder, or among the temporary files."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".noetl-transfer-", dir=folder)
    os.fchmod(handle, 0o644)
    os.close(handle)
    return Path(name)
