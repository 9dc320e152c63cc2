"""Rows into a file or an object."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
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
from noetl_dagster.tools.transfer.chunks import Chunk, ahead
from noetl_dagster.tools.transfer.drift import Drift
from noetl_dagster.tools.transfer.options import Options, Verify
from noetl_dagster.tools.transfer.places import Place, object_place
from noetl_dagster.tools.transfer.postgres import Outcome


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
