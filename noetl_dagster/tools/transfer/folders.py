"""A folder of files as a target: rows are staged part by part, and a command that runs again resumes."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import obstore
import pyarrow as pa
from pydantic import BaseModel

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.rows.reader import RowFile
from noetl_dagster.tools.sql.tables import Drift, WriteMode
from noetl_dagster.tools.transfer.checksum import Checksum
from noetl_dagster.tools.transfer.chunks import Transfer, TransferOutcome, ahead, without_new
from noetl_dagster.tools.transfer.files import ChunkFile, upload
from noetl_dagster.tools.transfer.options import ObjectFolder, Verify, open_object
from noetl_dagster.tools.transfer.staging import (
    KEY_TYPES,
    StagedTarget,
    can_resume,
    digest_of,
    refuse_if_over,
    seeks_by_row,
)

logger = logging.getLogger(__name__)

STAGING = "_noetl_transfer_"
POSITION = "position.json"
SUCCESS = "_SUCCESS"  # marks a complete folder, as of Spark; readers skip names that begin with _


class FolderPosition(BaseModel):
    """The staged part of a transfer.

    Attributes:
        prefix: the beginning of the names of its parts, which no other transfer uses.
        parts: rows of each part, in order.
        after: the position of the source after them.
        kept: the checksum of the parts.
        fields: the Arrow schema of the parts, if they are Parquet.
        complete: all parts are staged, and are being published.
        ended: the number of the last call of the command that has published its parts, with its outcome.
    """

    identity: str = ""
    prefix: str = ""
    parts: list[int] = []
    after: Any = None
    kept: str = "0:0"
    columns: list[str] = []
    ignored: list[str] = []
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
    call, context = transfer.call, transfer.tool_context
    lasting = can_resume(transfer, seeks=seeks_by_row(transfer.source), columns=KEY_TYPES)
    target = StagedFolder(transfer, await ObjectFolder.open(transfer.target, call, context), lasting=lasting)
    if lasting:
        context.after(call, target.discard)
        return await target.run()
    try:
        return await target.run()
    finally:
        await asyncio.shield(target.discard_if_possible())


class StagedFolder(StagedTarget):
    """Stages the parts of a folder in a folder below it.

    Its parts are ``part-<digest>-00000.parquet`` and so on, with the digest of the call. They are staged in one folder
    for all attempts of the command and all calls of its task, so that a later one finds the parts that an earlier one
    has published and could not remove.
    """

    def __init__(self, transfer: Transfer, folder: ObjectFolder, *, lasting: bool) -> None:
        super().__init__(transfer)
        self._target, self._folder, self._lasting = transfer.target, folder, lasting
        command, _, attempt = self._call.command_id.rpartition(":")
        source = self._call.config.get("source")
        words = [command, self._call.task.name, self._target.path, source, self._options.mode]
        self._attempt = int(attempt)
        self._staging = f"{STAGING}{digest_of(words)}"
        self._prefix = f"part-{digest_of([*words, self._attempt, self._call.number])}-"
        self._format = self._target.file_format
        self._position: FolderPosition

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[TransferOutcome | None]:
        """Finds the position of an earlier process or call, or creates one."""
        await self._clear(self._attempt - 1)
        state = await self._found(self._attempt) if self._lasting else None
        if state is not None and (
            self._call.number <= state.ended
            or state.complete
            or (state.parts and await self._is_unchanged(state.identity, state.after, state.rows))
        ):
            self._position, self._resumed = state, state.rows
            if state.outcome is not None and self._call.number <= state.ended:
                yield TransferOutcome(**state.outcome)
            else:
                yield None
            return
        await self.discard()
        position = self._position = FolderPosition(identity=self._source.identity, prefix=self._prefix)
        if state is not None:
            position.ended, position.outcome = state.ended, state.outcome
        if self._options.mode is WriteMode.APPEND and self._format is RowFormat.PARQUET:
            names, _ = await self._folder.data_files()
            if names:
                first = self._target.file(names[0])
                file = await RowFile.of(first.path, *await open_object(first, self._call, self._transfer.tool_context))
                schema = (await asyncio.to_thread(file.parquet_schema)).remove_metadata()
                position.columns, position.fields = schema.names, _packed(schema)
        if self._lasting:
            await self._record(position)
        yield None

    async def _found(self, attempt: int) -> FolderPosition | None:
        with suppress(FileNotFoundError):
            answer = await obstore.get_async(self._folder.store, self._key(POSITION, attempt))
            return FolderPosition.model_validate_json(bytes(await answer.bytes_async()))
        return None

    async def stage(self) -> None:
        """Stages the parts after the position."""
        position = self._position
        if position.complete:  # some parts may be published already
            return
        drift = Drift(self._options.on_drift, f"folder {self._target.path}", position.columns or None)
        drift.ignored = position.ignored
        part: ChunkFile | None = None
        try:
            async for chunk in ahead(self._transfer.chunks(position.after)):
                if part is None:
                    packed = position.fields
                    schema = None if packed is None else pa.ipc.read_schema(pa.py_buffer(b64decode(packed)))
                    part = await asyncio.to_thread(ChunkFile, None, self._format, self._options.verify, schema)
                await asyncio.to_thread(part.write, without_new(drift, chunk))
                if part.rows >= self._options.part and (chunk.after is not None or not self._lasting):
                    position.after, position.columns = chunk.after, drift.columns or []
                    await self._store(part)
                    part = None
                    if self._lasting:
                        await self._record(position)
            if part is not None:  # recorded when all is staged, because no position is known after it
                await self._store(part)
        finally:
            if part is not None:
                await asyncio.to_thread(part.path.unlink, missing_ok=True)
        await self._take_back(position)  # the position of a killed process may be lost, but not its parts
        position.complete = True
        await self._record(position)

    async def _store(self, part: ChunkFile) -> None:
        """Adds a part to the staging."""
        position = self._position
        await asyncio.to_thread(part.close)
        name = f"{self._target.path}, part {len(position.parts)}"
        size = await asyncio.to_thread(part.check_rows, name)
        if self._options.verify is Verify.CHECKSUM:
            stored = await asyncio.to_thread(part.check_values, self._options.size, name)
            position.kept = str(Checksum.of_text(position.kept) + stored)
        key = self._key(self._name(position, len(position.parts)))
        await upload(self._folder.store, key, part.path, name, size)
        if part.schema is not None:
            position.fields = _packed(part.schema)
        position.parts.append(part.rows)
        await asyncio.to_thread(part.path.unlink)

    async def publish(self) -> TransferOutcome:
        """Copies the parts to the folder, and records the outcome."""
        position, store, key = self._position, self._folder.store, self._folder.key
        await refuse_if_over(self._transfer)
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
        if self._options.verify is Verify.CHECKSUM:
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
        copying = asyncio.ensure_future(obstore.copy_async(self._folder.store, self._key(name), self._folder.key(name)))
        try:
            await asyncio.shield(copying)
        finally:
            await asyncio.wait([copying])

    async def _take_back(self, position: FolderPosition) -> None:
        """Removes the parts that are published."""
        there, _ = await self._folder.data_files()
        await self._delete([self._folder.key(name) for name in there if name.startswith(position.prefix)])

    async def _record(self, position: FolderPosition) -> None:
        await obstore.put_async(self._folder.store, self._key(POSITION), position.model_dump_json().encode())

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
            objects = await obstore.list(self._folder.store, prefix=staging).collect_async()
        except obstore.exceptions.BaseError as error:
            if "NoSuchBucket" not in str(error):
                raise
            return
        names = [meta["path"].rpartition("/")[2] for meta in objects]
        old = [name for name in names if int(name.partition(".")[0]) <= last]
        for attempt in {int(name.partition(".")[0]) for name in old}:
            position = await self._found(attempt)
            if position is not None and position.complete and self._options.mode is WriteMode.APPEND:
                await self._take_back(position)
        # the position goes last, because it lists the parts
        await self._delete([f"{staging}/{name}" for name in sorted(old, key=lambda name: name.endswith(POSITION))])
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


def _packed(schema: pa.Schema) -> str:
    return b64encode(schema.serialize().to_pybytes()).decode()
