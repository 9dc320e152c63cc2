"""Stores the rows of a call chunk by chunk, and goes on where an earlier run of the call stopped."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from noetl_dagster.errors import ToolError
from noetl_dagster.result_ref import ResultRef, RowsAround
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.tools.base import Chunk, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.rows.formats import CHUNK_ROWS


@dataclass(slots=True)
class _Held:
    """A stored chunk that waits for what comes after it, which it says."""

    index: int
    ref: ResultRef
    position: Any


class _Lines:
    """Lines of the chunk that is being made, in pages of its own: they go back to the system when it is stored, while
    those of a growing ``bytearray`` may stay with the process."""

    def __init__(self, capacity: int) -> None:
        self._pages = _pages(capacity)
        self.size = 0
        self.rows = 0

    def take(self, lines: JsonLines) -> None:
        end = self.size + len(lines.data)
        if end > len(self._pages):
            before, self._pages = self._pages, _pages(2 * end)
            self._pages[: self.size] = before[: self.size]
            before.close()
        self._pages[self.size : end] = bytes(lines.data)
        self.size, self.rows = end, self.rows + lines.rows

    @property
    def data(self) -> memoryview:
        return memoryview(self._pages)[: self.size]


def _pages(capacity: int) -> mmap.mmap:
    return mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class ChunkWriter:
    """The chunks of one call's result.

    ``put`` stores what is a chunk already. ``add`` and ``take`` cut chunks themselves, and store one while the next
    is being made; who uses them does so in ``async with``, which lets nothing go on after a failure.

    A chunk says whether another one follows, so the latest is held back until then: its reference, not its rows.

    Attributes:
        stored: chunks that an earlier run of the call has stored.
        position: where a producer that can seek goes on: what came with the last stored chunk; None at the beginning.
        rows: of the result so far: of the chunks before ``position``, and those that came since.
        is_whole: an earlier run has stored all of them, ``finish()`` is all that is left to do; known from the
            beginning where the producer seeks or a step takes the chunks, else never.
        holds_back: chunks are told of at the end only, by a producer whose work may be undone until then.
    """

    def __init__(
        self, call: ToolCall, box: Toolbox, stored: Sequence[Chunk], *, seeks: bool, size: int | None = None
    ) -> None:
        self._call = call
        self._box = box
        self._seeks = seeks
        self._parts = [chunk.ref for chunk in stored]
        self._place = len(stored) if seeks else 0
        self._held: list[_Held] = []
        self._last = stored[-1].position if stored else None
        self._limit = box.settings.chunk_bytes
        self._size = size
        self._lines: _Lines | None = None
        self._columns: Mapping[str, str] | None = None
        self._at: Any = None
        self._storing: asyncio.Task[None] | None = None
        self._asked = True
        self.holds_back = False
        self.rows = sum(ref.rows or 0 for ref in self._parts) if seeks else 0
        self.stored = len(stored)
        self.is_whole = bool(stored) and not stored[-1].more
        self.position = None if self.is_whole else self._last

    @classmethod
    async def open(
        cls, call: ToolCall, box: Toolbox, *, seeks: bool = False, size: int | None = None
    ) -> Self:
        """A writer that goes on after what is stored.

        Args:
            seeks: the producer begins at ``position``; else it begins anew, and what is stored is only compared.
            size: rows of the chunks that ``add`` and ``take`` cut, at most; None bounds only their bytes, or those
                that a step takes at ``CHUNK_ROWS``: as Python's values small rows are many times their bytes.
        """
        is_wanted = cls.is_wanted(call, box)
        at_once = seeks or is_wanted
        if size is None and is_wanted:
            size = CHUNK_ROWS
        stored = await box.chunks.told(call) if box.chunks is not None and at_once else []
        writer = cls(call, box, stored, seeks=seeks, size=size)
        writer._asked = box.chunks is None or at_once
        return writer

    @classmethod
    def is_wanted(cls, call: ToolCall, box: Toolbox) -> bool:
        """Whether a step takes the chunks as they come, so that a small result is one too."""
        return box.chunks is not None and box.chunks.wanted(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)

    @property
    def room(self) -> int | None:
        """Rows until the chunk that is being made is full; None where only its bytes count."""
        taken = 0 if self._lines is None else self._lines.rows
        return None if self._size is None else self._size - taken

    async def add(self, rows: Sequence[Any], position: Any = None) -> None:
        """Takes rows of JSON values as they come, and stores a chunk whenever there are enough for one.

        Args:
            position: where a producer that can seek goes on after the last of them.

        Raises:
            ToolError, StorageError: as :meth:`put`, of this chunk or the one before.
        """
        start = 0
        while start < len(rows):
            stop = len(rows) if self.room is None else min(len(rows), start + self.room)
            some = rows[start:stop]
            await self.take(
                JsonLines(codec.json_lines(some), len(some)), position if stop == len(rows) else None
            )
            start = stop

    async def take(self, lines: JsonLines, position: Any = None) -> None:
        """As :meth:`add`, of at most :attr:`room` rows that are JSON already."""
        held = self._lines = self._lines or _Lines(self._limit + self._limit // 8)
        held.take(lines)
        self.rows += lines.rows
        self._columns = lines.columns
        self._at = position
        if self._storing is not None and (self._storing.done() or 8 * held.size >= self._limit):
            await self._stored()  # so that there are never two whole chunks
        if held.size >= self._limit or self.room == 0:
            await self._cut()

    async def put(self, rows: Any, position: Any = None) -> None:
        """Stores the next chunk, a list, an Arrow table or JSON lines, and tells of the one before.

        Raises:
            ToolError: a chunk that is stored already was another one: the source has changed meanwhile.
            StorageError: no tier took it.
        """
        value = JsonLines(codec.json_lines(rows), len(rows)) if isinstance(rows, list) else rows
        self.rows += value.rows if isinstance(value, JsonLines) else value.num_rows
        await self._put(value, position)

    async def _put(self, value: Any, position: Any) -> None:
        if not self._asked:  # most calls have no chunks, and need not ask the log for any
            self._asked = True
            assert self._box.chunks is not None
            self._parts = [chunk.ref for chunk in await self._box.chunks.told(self._call)]
            self.stored = len(self._parts)
        place, self._place = self._place, self._place + 1
        if place < self.stored and await self._is_same(place, value):
            return
        spec = self._call.task.spec.result
        ref = await self._box.results.put(
            value,
            execution_id=self._call.execution_id,
            step=self._call.step,
            name=f"{self._call.task.name}-chunk-{place}",
            spec=spec.model_copy(update={"name": None, "select": ()}),
            tier=self._tier(value),
        )
        if place < self.stored:
            self._parts[place] = ref
            return
        if not self.holds_back:
            await self._tell(more=True)
        self._held.append(_Held(place, ref, position))
        self._parts.append(ref)

    async def finish(
        self, fields: Mapping[str, Any] | None = None, at: Sequence[str] = ("rows",)
    ) -> ResultRef:
        """Tells of the last chunk and makes one result of all: a list of rows, or one beside ``fields``.

        Args:
            fields: of a result that ``is_whole`` those count that the earlier run has given.
            at: dotted paths in ``fields`` where the rows stand.
        """
        await self._stored()
        if self._lines is not None:
            await self._cut()
            await self._stored()
        around: RowsAround | None = None
        if self.is_whole:
            if fields is not None and self._last is not None:
                around = RowsAround.model_validate(self._last)
        else:
            self._end()
            around = None if fields is None else await self._around(fields, at)
        await self._tell(more=False, around=around)
        spec = self._call.task.spec.result
        return await self._box.results.manifest(
            self._call.execution_id,
            self._call.step,
            self._call.task.name,
            self._parts,
            Strategy.CONCAT,
            spec=spec,
            around=around,
            extracted=await self._extracted(around, spec.select),
        )

    def _tier(self, value: Any) -> Any:
        """Where a chunk goes: a small one stays in its reference, unless the task says otherwise."""
        small = isinstance(value, JsonLines) and len(value.data) <= self._box.settings.inline_result_bytes
        wanted = self._call.task.spec.result.store
        return StoreTier.EVENTLOG if small and wanted is None else wanted

    async def _cut(self) -> None:
        await self._stored()
        held, self._lines = self._lines, None
        assert held is not None
        lines = JsonLines(held.data, held.rows, self._columns)
        self._storing = asyncio.create_task(self._put(lines, self._at))

    async def _stored(self) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing

    async def _tell(self, *, more: bool, around: RowsAround | None = None) -> None:
        """Tells of the chunks that are held back; the last one's position is what stands around the rows, if any."""
        held, self._held = self._held, []
        if self._box.chunks is None:
            return
        chunks = [Chunk(one.index, one.ref, one.position) for one in held]
        if chunks and not more:
            position = held[-1].position
            if around is not None:
                position = around.model_dump(mode="json", exclude_defaults=True)
            chunks[-1] = Chunk(held[-1].index, held[-1].ref, position, more=False)
        await self._box.chunks.tell(self._call, *chunks)

    async def _is_same(self, place: int, value: Any) -> bool:
        """Whether a chunk is stored already as it comes now. Another one is an error where its step has had it."""
        before = self._parts[place].sha256
        if before == await self._box.results.digest(value, self._call.task.spec.result):
            return True
        self._refuse_change(f"chunk {place} is not what it was")
        return False

    def _end(self) -> None:
        """Chunks of an earlier run that did not come again are no part of the result."""
        if self._place < len(self._parts):
            self._refuse_change(f"there are {self._place} chunks, not {len(self._parts)} as there were")
            del self._parts[self._place :]

    def _refuse_change(self, what: str) -> None:
        if not self.is_wanted(self._call, self._box):
            return
        raise ToolError(
            f"{self._call.task.kind} in step {self._call.step}: {what} when an earlier run stored it, and a step has "
            "taken it; the source has changed, or gives its rows in another order each time: order them, or start a "
            "new execution",
            kind="schema",
        )

    async def _around(self, fields: Mapping[str, Any], at: Sequence[str]) -> RowsAround:
        """What stands around the rows; fields that are too large for events are stored."""
        limit = self._box.settings.inline_result_bytes
        large = {name for name, value in fields.items() if 4 * codec.byte_length(value) > limit}
        stored = {
            name: await self._box.results.put(
                fields[name],
                execution_id=self._call.execution_id,
                step=self._call.step,
                name=f"{self._call.task.name}-{name}",
            )
            for name in large
        }
        small = {name: value for name, value in fields.items() if name not in large}
        return RowsAround(fields=small, at=tuple(at), stored=stored)

    async def _extracted(self, around: RowsAround | None, select: Sequence[str]) -> dict[str, Any]:
        """Selected fields, those of the first chunk's rows among them."""
        if not select:
            return {}
        first = await self._box.results.get(self._parts[0]) if self._parts else []
        paths = [path for path in select if ".-" not in path]
        whole = first if around is None else around.mapping(first, {})
        return codec.select_fields(whole, paths, self._box.settings.inline_result_bytes)


class ChunkedResult:
    """Takes gathered rows and gives one result of them.

    Attributes:
        most_bytes: the size that a source cuts for which cuts its rows itself.
        chunk_bytes: the size to gather for; 0 where a step takes every addition as a chunk of its own.
        position: where a producer that can seek goes on; None at the beginning, and for all others.
        wanted: a step takes the chunks as they come, so that a small result is one too.
    """

    def __init__(self, call: ToolCall, box: Toolbox) -> None:
        self._call = call
        self._box = box
        self._writer: ChunkWriter | None = None
        self._rest: Any = []
        self.wanted = box.chunks is not None and box.chunks.wanted(call)
        self.most_bytes = box.settings.chunk_bytes
        self.chunk_bytes = 0 if self.wanted else self.most_bytes
        self.position: Any = None

    async def seek(self) -> bool:
        """Asks where an earlier run of the call stopped; False when there is nothing left to do."""
        writer = await ChunkWriter.open(self._call, self._box, seeks=True)
        if writer.stored and writer.position is None and not writer.is_whole:
            # it gave no positions: what is stored is compared
            writer = await ChunkWriter.open(self._call, self._box)
        self.position = writer.position
        if not writer.stored:
            return True  # a result that turns out small has no writer
        self._writer = writer
        return not writer.is_whole

    async def begin_again(self) -> None:
        """Of a producer that cannot go on at ``position`` after all: what is stored is compared."""
        self.position = None
        self._writer = await ChunkWriter.open(self._call, self._box)

    async def put(self, chunk: Gathered) -> bool:
        """Stores a chunk, or keeps it where it is all; False when an earlier run has stored all that there is.

        Raises:
            ToolError: what was stored before is not what comes now.
            StorageError: no tier took it.
        """
        if self._writer is None:
            if not (chunk.full or self.wanted):
                self._rest = chunk.rows
                return True
            self._writer = await ChunkWriter.open(self._call, self._box)
        if self._writer.is_whole:
            return False
        await self._writer.put(chunk.rows, chunk.position)
        return True

    async def result(
        self, fields: Mapping[str, Any] | None = None, details: Mapping[str, Any] | None = None
    ) -> ToolResult:
        """All rows, as a value when they were less than a chunk, else by reference.

        Args:
            fields: the result is a mapping of them and the rows as its ``data``; else it is the rows, a list or table.
            details: further parts of the envelope.
        """
        if self._writer is None and self.wanted and fields is not None:
            await self.put(Gathered([], full=False))  # a chunk of its own, so that the fields are no row
        if self._writer is not None:
            return ToolResult(ref=await self._writer.finish(fields, ("data",)), details=dict(details or {}))
        data = self._rest if fields is None else {**fields, "data": self._rest}
        return ToolResult(data=data, details=dict(details or {}))
