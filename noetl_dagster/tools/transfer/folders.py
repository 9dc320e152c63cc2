"""A folder of files as a target: rows are staged part by part, and a command that runs again resumes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.checksum import Checksum, compare_checksums
from noetl_dagster.tools.transfer.chunks import Drift, Transfer, TransferChunk, TransferOutcome, ahead
from noetl_dagster.tools.transfer.files import (
    ParquetTables,
    chunk_writer,
    compare,
    new_file,
    parquet_schema,
    upload,
)
from noetl_dagster.tools.transfer.options import ObjectFolder, Resumable, Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

logger = logging.getLogger(__name__)

STAGING = "_noetl_transfer_"
POSITION = "position.json"
SUCCESS = "_SUCCESS"
"""Spark's name for the marker of a complete folder; other readers skip names that begin with ``_``."""


@dataclass(slots=True)
class FolderPosition:
    """The staged part of a transfer.

    Attributes:
        prefix: the beginning of the names of its parts, which no other transfer uses.
        parts: rows of each part, in order.
        after: the position of the source after them.
        fields: the Arrow schema of the parts, if they are Parquet.
        complete: all parts are staged, and are being published.
        ended: the number of the last call of the command that has published its parts, with its outcome.
    """

    identity: str = ""
    prefix: str = ""
    parts: list[int] = field(default_factory=list)
    after: Any = None
    read: str = "0:0"
    kept: str = "0:0"
    columns: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    fields: str | None = None
    complete: bool = False
    ended: int = 0
    outcome: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """The number of staged rows."""
        return sum(self.parts)


async def write_folder(transfer: Transfer) -> TransferOutcome:
    """Stages all parts in the folder, where readers do not look, then publishes them.

    Raises:
        ToolError: the parts do not hold the rows that were read; the folder's files are unchanged.
    """
    options, call, source, box = transfer.options, transfer.call, transfer.source, transfer.box
    if options.mode is WriteMode.UPSERT:
        raise ToolError(
            f"transfer in step {call.step}: mode: upsert is for tables; of a folder write append or replace",
            kind="schema",
        )
    seeks = source.seeks and not (isinstance(source, PostgresSource) and not source.seeks_by_row)
    if options.resumable is Resumable.TRUE and not seeks:
        raise ToolError(
            f"transfer in step {call.step}: resumable: true needs a source that can go on in the middle; name "
            "unique columns in source.order_by (whole numbers, text, UUIDs, dates or timestamps), or of http write "
            "source.paging",
            kind="schema",
        )
    lasting = (
        options.resumable is not Resumable.FALSE and seeks and bool(call.command_id) and box.after is not None
    )
    target = StagedFolder(transfer, await ObjectFolder.open(transfer.target, call, box), lasting=lasting)
    if not lasting:
        try:
            return await target.run()
        finally:
            await asyncio.shield(target.discard_if_possible())
    assert box.after is not None
    box.after(call, target.discard)
    return await target.run()


class StagedFolder:
    """A :class:`~noetl_dagster.tools.transfer.chunks.StagedTarget` in a folder of files.

    Its parts are ``part-<digest>-00000.parquet`` and so on, with the digest of the call. They are staged in one folder
    for all attempts of the command and all calls of its task, so that a later one finds the parts that an earlier one
    has published and could not remove.
    """

    def __init__(self, transfer: Transfer, folder: ObjectFolder, *, lasting: bool) -> None:
        self._transfer, self._folder, self._lasting = transfer, folder, lasting
        self._target, self._source = transfer.target, transfer.source
        self._options, self._call = transfer.options, transfer.call
        command, _, attempt = self._call.command_id.rpartition(":")
        source = self._call.config.get("source")
        words = [command or uuid.uuid4(), self._call.task.name, self._target.path, source, self._options.mode]
        self._attempt = int(attempt or 1)
        self._staging = f"{STAGING}{_digest(words)}"
        self._prefix = f"part-{_digest([*words, self._attempt, self._call.number])}-"
        self._format = self._target.file_format
        self._checked = self._options.verify is Verify.CHECKSUM
        self._position: FolderPosition
        self._resumed: int | None = None

    async def run(self) -> TransferOutcome:
        """Stages and publishes the parts, unless an earlier process has done so."""
        await self._begin()
        position = self._position
        if position.outcome is not None and self._call.number <= position.ended:
            return TransferOutcome(**position.outcome)
        await self.stage()
        return await self.publish()

    async def _begin(self) -> None:
        """Finds the position of an earlier process or call, or creates one."""
        identity = await self._source.identity()
        await self._clear(self._attempt - 1)
        found = await self._found(self._attempt) if self._lasting else None
        if found is not None and (self._call.number <= found.ended or await self._fits(found, identity)):
            self._position, self._resumed = found, found.rows
            return
        await self.discard()
        position = self._position = FolderPosition(identity, self._prefix)
        if found is not None:
            position.ended, position.outcome = found.ended, found.outcome
        if self._options.mode is WriteMode.APPEND and self._format is RowFormat.PARQUET:
            names, _ = await self._folder.data_files()
            if names:
                schema = await parquet_schema(self._target.file(names[0]), self._call, self._transfer.box)
                position.columns, position.fields = schema.names, _packed(schema)
        if self._lasting:
            await self._record(position)

    async def _found(self, attempt: int) -> FolderPosition | None:
        with suppress(FileNotFoundError):
            answer = await obstore.get_async(self._folder.store, self._key(POSITION, attempt))
            return FolderPosition(**orjson.loads(bytes(await answer.bytes_async())))
        return None

    async def _fits(self, found: FolderPosition, identity: str) -> bool:
        """Returns whether the source is the same as that of the position."""
        if found.complete:
            return True
        if found.identity != identity or not found.parts or found.after is None:
            return False
        if isinstance(self._source, PostgresSource):
            return await self._source.count_until(found.after) == found.rows
        return True

    async def stage(self) -> None:
        """Stages the parts after the position; may be killed anywhere and run again."""
        position = self._position
        if position.complete:  # some parts may be published already
            return
        drift = None
        if position.columns:
            drift = Drift(self._options.on_drift, f"folder {self._target.path}", position.columns)
            drift.ignored = position.ignored
        part: _Part | None = None
        try:
            async for chunk in ahead(self._transfer.chunks(position.after)):
                if drift is None:
                    drift = Drift(self._options.on_drift, f"folder {self._target.path}", chunk.columns)
                columns, _ = drift.sort(chunk.columns, str)
                if part is None:
                    part = await asyncio.to_thread(_Part, self._format, position.fields, self._checked)
                await asyncio.to_thread(part.write, chunk.only(columns))
                if part.rows >= self._options.part and (chunk.after is not None or not self._lasting):
                    position.after = chunk.after
                    position.columns, position.ignored = drift.columns, drift.ignored
                    await self._store(part)
                    part = None
            if part is not None:
                await self._store(part)
                part = None
        finally:
            if part is not None:
                await asyncio.to_thread(part.remove)
        if drift is not None:
            position.ignored = drift.ignored
        await self._take_back(position)  # the position of a killed process may be lost, but not its parts
        position.complete = True
        await self._record(position)

    async def _store(self, part: _Part) -> None:
        """Adds a part to the staging, and then the position after it."""
        position = self._position
        try:
            rows, size = await asyncio.to_thread(part.finish)
            name = f"{self._target.path}, part {len(position.parts)}"
            if self._options.verify is not Verify.NONE:
                compare("rows", part.rows, rows, name)
            if self._checked:
                kept = await asyncio.to_thread(part.writer.kept, self._options.size)
                compare_checksums(part.writer.read, kept, name, kind="storage")
                position.kept = str(Checksum.of_text(position.kept) + kept)
            key = self._key(self._name(position, len(position.parts)))
            expected = None if self._options.verify is Verify.NONE else size
            await upload(self._folder.store, key, part.path, name, expected)
            position.fields = part.fields
            position.parts.append(part.rows)
            if self._lasting:
                await self._record(position)
        finally:
            await asyncio.to_thread(part.remove)

    async def publish(self) -> TransferOutcome:
        """Copies the parts to the folder; may be killed anywhere and run again."""
        position, store, key = self._position, self._folder.store, self._folder.key
        await self._delete([key(SUCCESS)])
        names = [self._name(position, number) for number in range(len(position.parts))]
        there, _ = await self._folder.data_files()
        for name in names:
            if name not in there:
                await self._copy(name)
        if self._options.mode is WriteMode.REPLACE:
            await self._delete([key(name) for name in there if name not in names])
        await obstore.put_async(store, key(SUCCESS), b"")
        outcome = TransferOutcome(position.rows, position.rows, resumed=self._resumed)
        if self._checked:
            outcome.checksum = position.kept
        outcome.verified["parts"] = len(position.parts)
        if position.ignored:
            outcome.drift = {"ignored": position.ignored}
        await self._delete([self._key(name) for name in names])
        # from here on the parts stay: nothing may fail after it
        await self._record(FolderPosition(ended=self._call.number, outcome=asdict(outcome)))
        return outcome

    async def _copy(self, name: str) -> None:
        """Returns or raises after the copy has ended: a part that is taken back must not appear later."""
        copying = asyncio.ensure_future(
            obstore.copy_async(self._folder.store, self._key(name), self._folder.key(name))
        )
        try:
            await asyncio.shield(copying)
        finally:
            await asyncio.wait([copying])

    async def _take_back(self, position: FolderPosition) -> None:
        """Removes the parts that are published."""
        there, _ = await self._folder.data_files()
        await self._delete([self._folder.key(name) for name in there if name.startswith(position.prefix)])

    async def _record(self, position: FolderPosition) -> None:
        await obstore.put_async(self._folder.store, self._key(POSITION), orjson.dumps(asdict(position)))

    async def discard(self) -> None:
        """Removes the staging, and the published parts of an append that did not end."""
        try:
            await self._clear(self._attempt)
        except (obstore.exceptions.BaseError, OSError) as error:
            raise ToolError(f"transfer: cannot clean {self._target.path}: {error}", kind="storage") from None

    async def discard_if_possible(self) -> None:
        """Removes the staging; if that fails, the next attempt does it."""
        try:
            await self.discard()
        except ToolError as error:
            logger.warning("step %s: %s", self._call.step, error)

    async def _clear(self, last: int) -> None:
        """Removes the staging of the attempts up to ``last``."""
        staging = self._folder.key(self._staging)
        try:
            found = await obstore.list(self._folder.store, prefix=staging).collect_async()
        except obstore.exceptions.BaseError as error:
            if "NoSuchBucket" not in str(error):
                raise
            return
        names = [meta["path"].rpartition("/")[2] for meta in found]
        old = [name for name in names if int(name.partition(".")[0]) <= last]
        for attempt in {int(name.partition(".")[0]) for name in old}:
            position = await self._found(attempt)
            if position is not None and position.complete and self._options.mode is WriteMode.APPEND:
                await self._take_back(position)
        # the position goes last, because it lists the parts
        await self._delete(
            [f"{staging}/{name}" for name in sorted(old, key=lambda name: name.endswith(POSITION))]
        )
        if self._folder.local is not None and len(old) == len(names):
            with suppress(OSError):  # another process has begun
                await asyncio.to_thread((self._folder.local / self._staging).rmdir)

    async def _delete(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._folder.store, key)

    def _key(self, name: str, attempt: int | None = None) -> str:
        return self._folder.key(f"{self._staging}/{attempt or self._attempt}.{name}")

    def _name(self, position: FolderPosition, number: int) -> str:
        return f"{position.prefix}{number:05}.{self._format}"


class _Part:
    """One file among the temporary files, which is uploaded when it is complete.

    Attributes:
        fields: the schema of the next part.
    """

    def __init__(self, format: RowFormat, fields: str | None, checked: bool) -> None:
        self.path: Path = new_file(None)
        self.rows, self.fields, self._format = 0, fields, format
        schema = None if fields is None else _unpacked(fields)
        self.writer = chunk_writer(self.path, format, checked, schema)

    def write(self, chunk: TransferChunk) -> None:
        self.writer.write(chunk)
        self.rows += chunk.rows

    def finish(self) -> tuple[int, int]:
        """Completes the file; returns its rows and bytes."""
        self.writer.close()
        rows = self.rows
        if isinstance(self.writer, ParquetTables):
            rows = pq.read_metadata(self.path).num_rows
            assert self.writer.schema is not None
            self.fields = _packed(self.writer.schema)
        return rows, self.path.stat().st_size

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _digest(words: list[Any]) -> str:
    text = orjson.dumps(words, default=str, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _packed(schema: pa.Schema) -> str:
    return b64encode(schema.serialize().to_pybytes()).decode()


def _unpacked(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(b64decode(text)))
