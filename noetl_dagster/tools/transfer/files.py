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
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import Numbers, loads_exact
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.rows.batches import rows_of
from noetl_dagster.tools.rows.cutters import RECORD_BYTES, cutter_for
from noetl_dagster.tools.rows.files import ParquetRows, row_writer
from noetl_dagster.tools.rows.formats import BlockOrigin, RowFormat, check_columns, csv_rows, unnamed_columns
from noetl_dagster.tools.rows.reader import BLOCK_BYTES, RowFile, cut, read_written, threaded
from noetl_dagster.tools.sql.tables import Drift
from noetl_dagster.tools.transfer.checksum import (
    Checksum,
    compare_checksums,
    sum_of_kept,
    sum_of_table,
    sum_of_written,
)
from noetl_dagster.tools.transfer.chunks import (
    Transfer,
    TransferChunk,
    TransferOutcome,
    TransferSource,
    ahead,
    sliced,
    without_new,
)
from noetl_dagster.tools.transfer.options import ObjectFolder, TransferEnd, Verify, open_object
from noetl_dagster.tools.transfer.staging import refuse_if_over


class FileSource(TransferSource):
    """A file or an object, read in place."""

    def __init__(self, file: RowFile, end: TransferEnd, size: int) -> None:
        self._file, self._size = file, size
        self._format, self._numbers = end.file_format, end.numbers
        # if the playbook does not name the format, one value of an array may be the whole file
        is_one_value = self._format is RowFormat.JSON and not end.format
        self._longest = file.size if is_one_value else RECORD_BYTES
        self.bytes, self.identity = file.size, file.version

    @classmethod
    async def of(cls, end: TransferEnd, call: ToolCall, context: ToolContext, size: int) -> FileSource:
        """Finds a file; its chunks have at most ``size`` rows."""
        return cls(await RowFile.of(end.path, *await open_object(end, call, context)), end, size)

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows, from a position on."""
        file, position = self._file, after or {}
        if self._format is RowFormat.PARQUET:
            batches = file.parquet_batches(position.get("row", 0), self._size, pre_buffer=True)
            async for batch, row in threaded(batches):
                yield TransferChunk(pa.Table.from_batches([batch]), {"row": row})
        elif self._format is RowFormat.JSON and not position and not await file.is_array():
            whole = b"".join([block async for block in file.blocks()])
            yield TransferChunk(rows_of([await asyncio.to_thread(loads_exact, whole, self._numbers)]), _END)
        else:
            blocks = file.blocks(position.get("offset", 0))
            rows = text_chunks(
                blocks, self._format, self._size, file.name, position, longest=self._longest, numbers=self._numbers
            )
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
    numbers: Numbers = Numbers.EXACT,
) -> AsyncIterator[TransferChunk]:
    """Yields the rows of JSON lines, CSV or a JSON array in chunks of at most ``size``.

    Args:
        name: for errors.
        position: where the blocks begin, if not at the beginning of the text.
        longest: bytes that a record may have.
        numbers: the answer to JSON numbers that would change.
    """
    if position == _END:
        return
    cutter = cutter_for(format, BLOCK_BYTES, position, name, longest=longest, parse_csv=csv_table, numbers=numbers)
    async for piece in cut(blocks, cutter):
        rows = rows_of(piece.rows) if isinstance(piece.rows, list) else piece.rows
        after = {"offset": piece.offset, "columns": cutter.columns} if piece.full else _END
        async for chunk in sliced(rows, size, after):
            yield chunk


def csv_table(
    block: bytes, columns: Sequence[str] | None, origin: BlockOrigin, encoding: str = "utf-8"
) -> tuple[list[str] | None, Any]:
    """Parses CSV as :func:`csv_rows` does, into an Arrow table of text, which takes a tenth of the time."""
    if (broken := origin.broken_quote(block)) is not None:
        raise broken
    names, skipped = list(columns or ()), 0
    if columns is None:
        header = csv.reader(io.StringIO(block.decode("utf-8-sig"), newline=""))
        names = next((row for row in header if row), [])
        check_columns(names, origin)
        skipped = header.line_num
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(block),
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=skipped, use_threads=False),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
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


class FolderSource(TransferSource):
    """The files of a folder one after another, by name, except those whose names begin with ``_`` or ``.``."""

    def __init__(self, names: list[str], files: list[FileSource]) -> None:
        self._files = files
        self.bytes = sum(file.bytes for file in files)
        versions = "\n".join(f"{name}:{file.identity}" for name, file in zip(names, files, strict=True))
        self.identity = hashlib.blake2b(versions.encode(), digest_size=16).hexdigest()

    @classmethod
    async def of(cls, end: TransferEnd, call: ToolCall, context: ToolContext, size: int) -> FolderSource:
        """Raises ``ToolError`` if there is no such folder, or if there are folders in it."""
        folder = await ObjectFolder.open(end, call, context)
        names, below = await folder.data_files()
        if below:
            raise call.error(
                f"source.path: {end.path} has folders, such as {below[0]}; a folder's own files are read: name one of "
                "them, or read all with a query of kind duckdb"
            )
        return cls(names, [await FileSource.of(end.file(name), call, context, size) for name in names])

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows, from a position on."""
        first, inner = (after["file"], after["after"]) if after is not None else (0, None)
        for number in range(first, len(self._files)):
            async for chunk in self._files[number].chunks(inner):
                there = None if chunk.after is None else {"file": number, "after": chunk.after}
                yield TransferChunk(chunk.data, there)
            inner = None


async def write_file(transfer: Transfer) -> TransferOutcome:
    """Writes a local file, then moves or uploads it as a whole: readers never see a part of it."""
    target, options = transfer.target, transfer.options
    store, key = await open_object(target, transfer.call, transfer.tool_context)
    folder = None if store is not None else Path(key).parent
    file = await asyncio.to_thread(ChunkFile, folder, target.file_format, options.verify)
    drift = Drift(options.on_drift, f"the file {target.path}")
    try:
        with contextlib.closing(file):
            async for chunk in ahead(transfer.chunks()):
                await asyncio.to_thread(file.write, without_new(drift, chunk))
        outcome = TransferOutcome(file.rows, file.rows, drift=drift.report())
        size = await asyncio.to_thread(file.check_rows, file.path)
        if size is not None:
            outcome.verified["bytes"] = size
            outcome.checksum = f"sha256:{await asyncio.to_thread(file.sha256)}"
        if options.verify is Verify.CHECKSUM:
            stored = await asyncio.to_thread(file.check_values, options.size, f"the file {target.path}")
            outcome.verified["sha256"], outcome.checksum = outcome.checksum, str(stored)
        await refuse_if_over(transfer)
        if store is None:
            await asyncio.to_thread(file.path.replace, key)
        else:
            await upload(store, key, file.path, target.path, size)
    finally:
        await asyncio.to_thread(file.path.unlink, missing_ok=True)
    return outcome


async def upload(store: Any, key: str, path: Path, name: str, size: int | None) -> None:
    """Uploads a file, and compares the size of the object if one is given."""
    await obstore.put_async(store, key, path)
    if size is not None:
        _compare("bytes", size, (await obstore.head_async(store, key))["size"], name)


def _compare(unit: str, sent: int, stored: int, name: Any) -> None:
    """Raises ``ToolError`` if a file does not hold as much as was written."""
    if sent != stored:
        raise ToolError(f"transfer: {sent} {unit} were written to {name}, which has {stored}", kind="storage")


ROWS_OF_A_GROUP = 100_000  # smaller groups make Parquet large and slow; a resumed transfer skips whole ones


class ChunkFile:
    """A new file of chunks: in a folder, where other workers can read it, or among the temporary files.

    Attributes:
        rows: number of the rows in it.
    """

    def __init__(self, folder: Path | None, format: RowFormat, verify: Verify, schema: pa.Schema | None = None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".noetl-transfer-", dir=folder)
        if folder is not None:
            os.fchmod(handle, 0o644)
        os.close(handle)
        self.path, self.rows = Path(name), 0
        self._format, self._verify = format, verify
        self._writer = row_writer(self.path, format, schema, ROWS_OF_A_GROUP)
        self._read = Checksum()
        checks_tables = verify is Verify.CHECKSUM and format is RowFormat.PARQUET
        self._duckdb = duckdb.connect() if checks_tables else None

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of Parquet; None before the first chunk."""
        return self._writer.schema if isinstance(self._writer, ParquetRows) else None

    def write(self, chunk: TransferChunk) -> None:
        """Writes the rows of a chunk."""
        if isinstance(self._writer, ParquetRows):
            table = self._writer.write(chunk.data)
            if self._duckdb is not None:
                self._read += sum_of_table(self._duckdb, table)
        else:
            written = self._writer.write(chunk.data)
            if self._verify is Verify.CHECKSUM:
                self._read += sum_of_written(chunk.as_rows(), written, self._format)
        self.rows += chunk.rows

    def close(self) -> None:
        """Completes the file."""
        self._writer.close()

    def check_rows(self, name: object) -> int | None:
        """Returns the bytes of the file, whose rows are counted if it is Parquet; None if it is not to be verified."""
        if self._verify is Verify.NONE:
            return None
        if self._format is RowFormat.PARQUET:
            _compare("rows", self.rows, pq.read_metadata(self.path).num_rows, name)
        return self.path.stat().st_size

    def check_values(self, size: int, where: str) -> Checksum:
        """Compares the checksum of the rows that were written with that of the file, and returns it."""
        stored = Checksum()
        if self._duckdb is not None:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=size):
                    stored += sum_of_table(self._duckdb, pa.Table.from_batches([batch]))
        else:
            for rows in read_written(self.path, self._format):
                stored += sum_of_kept(rows, self._format)
        compare_checksums(self._read, stored, where, kind="storage")
        return stored

    def sha256(self) -> str:
        """Returns the hash of the bytes."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
