"""Rows into a folder of files, part by part, which whoever runs the command again goes on with."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.checksum import Checksum, compare_checksums
from noetl_dagster.tools.transfer.chunks import Chunk, Drift, Source, ahead
from noetl_dagster.tools.transfer.files import ParquetTables, TextRows, equal, new_file, parquet_schema
from noetl_dagster.tools.transfer.options import (
    Folder,
    Options,
    Place,
    Resumable,
    Verify,
    data_files,
    open_folder,
    place_format,
)
from noetl_dagster.tools.transfer.postgres_source import PostgresSource
from noetl_dagster.tools.transfer.postgres_target import Outcome

logger = logging.getLogger(__name__)

STAGING = "_noetl_transfer_"
POSITION = "position.json"
SUCCESS = "_SUCCESS"
"""Spark's name for the sign that a folder is complete; other readers pass over names that begin with ``_``."""

Watch = Callable[[AsyncIterator[Chunk]], AsyncIterator[Chunk]]


@dataclass(slots=True)
class Position:
    """What of a transfer lies in the folder's staging.

    Attributes:
        prefix: how the names of the parts begin; no other transfer's do.
        parts: rows of each part, in their order.
        after: where the source goes on behind them.
        fields: the Arrow schema of the parts, where they have one.
        complete: all parts are there, and are being published.
        ended: the number of the last call of the command that has published its parts, and what came of it.
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
        return sum(self.parts)


async def write_parts(
    place: Place, source: Source, options: Options, call: ToolCall, box: Toolbox, watch: Watch
) -> Outcome:
    """Stages all parts in the folder, where readers do not look, then publishes them.

    Raises:
        ToolError: what was written is not what was read; the folder's files are as they were.
    """
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
    folder = await open_folder(place, call, box)
    parts = _Parts(place, source, options, call, box, folder, lasting=lasting)
    if not lasting:
        try:
            return await parts.run(watch)
        finally:
            await asyncio.shield(parts.clean_if_possible())
    assert box.after is not None
    box.after(call, parts.clean)
    return await parts.run(watch)


class _Parts:
    """The parts of one transfer: ``part-<digest>-00000.parquet`` and so on, the digest of its call.

    They are staged in one folder for all attempts of the command and all calls of its task, so that a later one finds
    what an earlier one has published and could not take back.
    """

    def __init__(
        self, place: Place, source: Source, options: Options, call: ToolCall, box: Toolbox, folder: Folder, *,
        lasting: bool,
    ) -> None:  # fmt: skip
        self._place, self._source, self._options, self._call = place, source, options, call
        self._box, self._folder, self._lasting = box, folder, lasting
        work, _, attempt = call.command_id.rpartition(":")
        words = [work or uuid.uuid4(), call.task.name, place.path, call.config.get("source"), options.mode]
        self._attempt = int(attempt or 1)
        self._staging = f"{STAGING}{_digest(words)}"
        self._prefix = f"part-{_digest([*words, self._attempt, call.number])}-"
        self._format = place_format(place)
        self._checked = options.verify is Verify.CHECKSUM

    async def run(self, watch: Watch) -> Outcome:
        position, resumed = await self._begin()
        if position.outcome is not None and self._call.number <= position.ended:
            return Outcome(**position.outcome)
        again = position.complete
        if not again:
            await self._stage(position, watch)
        await self._publish(position, again=again)
        outcome = Outcome(position.rows, position.rows, resumed=resumed)
        if self._checked:
            outcome.checksum = position.kept
        outcome.verified["parts"] = len(position.parts)
        if position.ignored:
            outcome.drift = {"ignored": position.ignored}
        await self._delete([self._key(name) for name in self._names(position)])
        # from here on the parts stay: nothing may fail behind it
        await self._note(Position(ended=self._call.number, outcome=asdict(outcome)))
        return outcome

    async def _begin(self) -> tuple[Position, int | None]:
        """The position of an earlier process or call and its rows, or a new one."""
        identity = await self._source.identity()
        await self._clear(self._attempt - 1)
        found = await self._found(self._attempt) if self._lasting else None
        if found is not None and (self._call.number <= found.ended or await self._fits(found, identity)):
            return found, found.rows
        await self.clean()
        position = Position(identity, self._prefix)
        if found is not None:
            position.ended, position.outcome = found.ended, found.outcome
        if self._options.mode is WriteMode.APPEND and self._format is RowFormat.PARQUET:
            names, _ = await data_files(self._folder)
            if names:
                schema = await parquet_schema(self._place, names[0], self._call, self._box)
                position.columns, position.fields = schema.names, _packed(schema)
        if self._lasting:
            await self._note(position)
        return position, None

    async def _found(self, attempt: int) -> Position | None:
        with suppress(FileNotFoundError):
            answer = await obstore.get_async(self._folder.store, self._key(POSITION, attempt))
            return Position(**orjson.loads(bytes(await answer.bytes_async())))
        return None

    async def _fits(self, found: Position, identity: str) -> bool:
        """Whether the source is the one of that position."""
        if found.complete:
            return True
        if found.identity != identity or not found.parts or found.after is None:
            return False
        if isinstance(self._source, PostgresSource):
            return await self._source.count_until(found.after) == found.rows
        return True

    async def _stage(self, position: Position, watch: Watch) -> None:
        drift = None
        if position.columns:
            drift = Drift(self._options.on_drift, f"folder {self._place.path}", position.columns)
            drift.ignored = position.ignored
        part: _Part | None = None
        try:
            async for chunk in ahead(watch(self._source.chunks(position.after))):
                if drift is None:
                    drift = Drift(self._options.on_drift, f"folder {self._place.path}", chunk.columns)
                columns, _ = drift.sort(chunk.columns, str)
                if part is None:
                    part = await asyncio.to_thread(_Part, self._format, position.fields, self._checked)
                await asyncio.to_thread(part.write, chunk.only(columns))
                if part.rows >= self._options.part and (chunk.after is not None or not self._lasting):
                    position.after = chunk.after
                    position.columns, position.ignored = drift.columns, drift.ignored
                    await self._store(part, position)
                    part = None
            if part is not None:
                await self._store(part, position)
                part = None
        finally:
            if part is not None:
                await asyncio.to_thread(part.remove)
        if drift is not None:
            position.ignored = drift.ignored
        position.complete = True
        await self._note(position)

    async def _store(self, part: _Part, position: Position) -> None:
        """Adds a part to the staging, and then the position behind it."""
        try:
            rows, size = await asyncio.to_thread(part.finish)
            where = f"{self._place.path}, part {len(position.parts)}"
            if self._options.verify is not Verify.NONE:
                equal("rows", part.rows, rows, where)
            if self._checked:
                kept = await asyncio.to_thread(part.writer.kept, self._options.size)
                compare_checksums(part.writer.read, kept, where, kind="storage")
                position.kept = str(Checksum.of_text(position.kept) + kept)
            key = self._key(self._name(position, len(position.parts)))
            await obstore.put_async(self._folder.store, key, part.path)
            if self._options.verify is not Verify.NONE:
                equal("bytes", size, (await obstore.head_async(self._folder.store, key))["size"], where)
            position.fields = part.fields
            position.parts.append(part.rows)
            if self._lasting:
                await self._note(position)
        finally:
            await asyncio.to_thread(part.remove)

    async def _publish(self, position: Position, *, again: bool) -> None:
        """Copies the parts to where readers look; may be done again after a kill anywhere.

        Args:
            again: some of them may be there already.
        """
        store, key = self._folder.store, self._folder.key
        await self._delete([key(SUCCESS)])
        names = self._names(position)
        if not again:  # a process whose position is lost was killed
            await self._take_back(position)
        there, _ = await data_files(self._folder)
        for name in names:
            if name not in there:
                await self._copy(name)
        if self._options.mode is WriteMode.REPLACE:
            await self._delete([key(name) for name in there if name not in names])
        await obstore.put_async(store, key(SUCCESS), b"")

    async def _copy(self, name: str) -> None:
        """Returns or raises when nothing is under way any more: what is taken back must not come after all."""
        copying = asyncio.ensure_future(
            obstore.copy_async(self._folder.store, self._key(name), self._folder.key(name))
        )
        try:
            await asyncio.shield(copying)
        finally:
            await asyncio.wait([copying])

    async def _take_back(self, position: Position) -> None:
        there, _ = await data_files(self._folder)
        await self._delete([self._folder.key(name) for name in there if name.startswith(position.prefix)])

    async def _note(self, position: Position) -> None:
        await obstore.put_async(self._folder.store, self._key(POSITION), orjson.dumps(asdict(position)))

    async def clean(self) -> None:
        """Removes what is staged, and of an append what is published in part."""
        try:
            await self._clear(self._attempt)
        except (obstore.exceptions.BaseError, OSError) as error:
            raise ToolError(f"transfer: cannot clean {self._place.path}: {error}", kind="storage") from None

    async def clean_if_possible(self) -> None:
        """Where it is not, the next attempt does it."""
        try:
            await self.clean()
        except ToolError as error:
            logger.warning("step %s: %s", self._call.step, error)

    async def _clear(self, last: int) -> None:
        """Removes what the attempts up to the ``last`` have left."""
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
        # the position goes last, so that what is left is known
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

    def _names(self, position: Position) -> list[str]:
        return [self._name(position, number) for number in range(len(position.parts))]

    def _name(self, position: Position, number: int) -> str:
        return f"{position.prefix}{number:05}.{self._format}"


class _Part:
    """One file that is being written, beside no other: it is uploaded when it is finished.

    Attributes:
        fields: the schema that the next part is to have.
    """

    def __init__(self, format: RowFormat, fields: str | None, checked: bool) -> None:
        self.path: Path = new_file(None)
        self.rows, self.fields, self._format = 0, fields, format
        self.writer: ParquetTables | TextRows = (
            ParquetTables(self.path, checked, None if fields is None else _unpacked(fields))
            if format is RowFormat.PARQUET
            else TextRows(self.path, format, checked)
        )

    def write(self, chunk: Chunk) -> None:
        self.writer.write(chunk)
        self.rows += chunk.rows

    def finish(self) -> tuple[int, int]:
        """The rows and bytes that the file has."""
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
