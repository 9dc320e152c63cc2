"""Stores the rows of a call chunk by chunk, and resumes after the chunks that an earlier run of the call stored."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from noetl_dagster.result_ref import ResultRef, RowsAround
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import JsonLines
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.tools.base import Chunk, ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.rows import CHUNK_ROWS


class _LinePages:
    """Lines of the chunk that is being made, in memory pages that return to the system when it is stored."""

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
    """Writes the chunks of one call's result.

    ``put`` stores a complete chunk. ``add`` and ``take`` cut chunks themselves, and store one while the next is being
    made; use them in ``async with``, which stops the storing after a failure.

    A chunk says whether another one follows, so the reference of the latest one is held back until that is known.

    Attributes:
        stored: number of chunks that an earlier run of the call has stored.
        position: at which a producer that can seek resumes, recorded with the last stored chunk; None at the beginning.
        rows: of the result so far: of the chunks before ``position``, and those that came since.
        is_whole: an earlier run has stored all chunks, and only ``finish()`` is left to do; known from the beginning if
            the producer seeks or a step takes the chunks, else never.
        holds_back: chunks are recorded only at the end, by a producer whose work may be undone until then.
    """

    def __init__(
        self, call: ToolCall, context: ToolContext, stored: Sequence[Chunk] | None, *, seeks: bool, size: int | None
    ) -> None:
        self._call, self._tool_context, self._size = call, context, size
        self._knows_stored = stored is not None
        stored = stored or ()
        self._parts = [chunk.ref for chunk in stored]
        self._place = len(stored) if seeks else 0
        # stored and not recorded yet, since the last one has to say whether another one follows
        self._held: list[Chunk] = []
        self._last = stored[-1].position if stored else None
        self._limit = context.settings.chunk_bytes
        self._lines: _LinePages | None = None
        self._columns: Mapping[str, str] | None = None
        self._at: Any = None
        self._storing: asyncio.Task[None] | None = None
        self.holds_back = False
        self.rows = sum(ref.rows or 0 for ref in self._parts) if seeks else 0
        self.stored = len(stored)
        self.is_whole = bool(stored) and not stored[-1].more
        self.position = None if self.is_whole else self._last

    @classmethod
    async def open(cls, call: ToolCall, context: ToolContext, *, seeks: bool = False, size: int | None = None) -> Self:
        """Opens a writer that continues after the stored chunks.

        Args:
            seeks: the producer resumes at ``position``; else it begins anew, and the stored chunks are only compared.
            size: rows of the chunks that ``add`` and ``take`` cut, at most; None limits only their bytes, and those
                that a step takes to ``CHUNK_ROWS``: small rows as Python values take many times their bytes.
        """
        wanted = context.chunks.wanted(call)
        stored = await context.chunks.recorded(call) if seeks or wanted else None
        return cls(call, context, stored, seeks=seeks, size=CHUNK_ROWS if size is None and wanted else size)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)

    @property
    def room(self) -> int | None:
        """Rows until the chunk that is being made is full; None if only its bytes count."""
        taken = 0 if self._lines is None else self._lines.rows
        return None if self._size is None else self._size - taken

    async def add(self, rows: Sequence[Any], position: Any = None) -> None:
        """Takes rows of JSON values as they arrive, and stores a chunk whenever there are enough for one.

        Args:
            position: at which a producer that can seek resumes after the last of them.
        """
        start = 0
        while start < len(rows):
            stop = len(rows) if self.room is None else min(len(rows), start + self.room)
            some = rows[start:stop]
            await self.take(JsonLines(codec.json_lines(some), len(some)), position if stop == len(rows) else None)
            start = stop

    async def take(self, lines: JsonLines, position: Any = None) -> None:
        """Takes at most :attr:`room` rows that are JSON already; else as :meth:`add`."""
        held = self._lines = self._lines or _LinePages(self._limit + self._limit // 8)
        held.take(lines)
        self.rows += lines.rows
        self._columns = lines.columns
        self._at = position
        if self._storing is not None and (self._storing.done() or 8 * held.size >= self._limit):
            await self._wait_until_stored()  # else there would be two whole chunks
        if held.size >= self._limit or self.room == 0:
            await self._cut()

    async def put(self, rows: Any, position: Any = None) -> None:
        """Stores the next chunk, a list, an Arrow table or JSON lines, and records the one before.

        Raises:
            ToolError: the stored chunk is another one: the source has changed.
            StorageError: no tier took it.
        """
        value = JsonLines(codec.json_lines(rows), len(rows)) if isinstance(rows, list) else rows
        self.rows += value.rows if isinstance(value, JsonLines) else value.num_rows
        await self._put(value, position)

    async def _put(self, value: Any, position: Any) -> None:
        if not self._knows_stored:  # most calls have no chunks, and do not query the log
            self._knows_stored = True
            self._parts = [chunk.ref for chunk in await self._tool_context.chunks.recorded(self._call)]
            self.stored = len(self._parts)
        place, self._place = self._place, self._place + 1
        if place < self.stored and await self._is_same(place, value):
            return
        spec = self._call.task.spec.result
        ref = await self._tool_context.results.put(
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
        self._held.append(Chunk(place, ref, position))
        self._parts.append(ref)

    async def finish(self, fields: Mapping[str, Any] | None = None, at: Sequence[str] = ("rows",)) -> ResultRef:
        """Records the last chunk and returns one result of all: a list of rows, or one beside ``fields``.

        Args:
            fields: of a result that ``is_whole`` those of the earlier run count.
            at: dotted paths of the rows in ``fields``.
        """
        await self._wait_until_stored()
        if self._lines is not None:
            await self._cut()
            await self._wait_until_stored()
        around: RowsAround | None = None
        if self.is_whole:
            if fields is not None and self._last is not None:
                around = RowsAround.model_validate(self._last)
        else:
            if self._place < len(self._parts):  # chunks of an earlier run that did not come again
                self._refuse_change(f"there are {self._place} chunks, not {len(self._parts)} as there were")
                del self._parts[self._place :]
            around = None if fields is None else await self._around(fields, at)
        await self._tell(more=False, around=around)
        spec = self._call.task.spec.result
        return await self._tool_context.results.manifest(
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
        """Returns the tier of a chunk: a small one stays in its reference, unless the task names a tier."""
        wanted = self._call.task.spec.result.store
        small = isinstance(value, JsonLines) and len(value.data) <= self._tool_context.settings.inline_result_bytes
        return StoreTier.EVENTLOG if small and wanted is None else wanted

    async def _cut(self) -> None:
        await self._wait_until_stored()
        held, self._lines = self._lines, None
        assert held is not None
        lines = JsonLines(held.data, held.rows, self._columns)
        self._storing = asyncio.create_task(self._put(lines, self._at))

    async def _wait_until_stored(self) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing

    async def _tell(self, *, more: bool, around: RowsAround | None = None) -> None:
        """Records the chunks that are held back; the last one's position holds the fields around the rows."""
        held, self._held = self._held, []
        if held and not more:
            last = held.pop()
            if around is not None:
                last = replace(last, position=around.model_dump(mode="json", exclude_defaults=True))
            held.append(replace(last, more=False))
        await self._tool_context.chunks.record(self._call, *held)

    async def _is_same(self, place: int, value: Any) -> bool:
        """Returns whether a stored chunk equals this one. If its step has taken it, a difference is an error."""
        before = self._parts[place].sha256
        if before == await self._tool_context.results.digest(value, self._call.task.spec.result):
            return True
        self._refuse_change(f"chunk {place} is not what it was")
        return False

    def _refuse_change(self, what: str) -> None:
        if self._tool_context.chunks.wanted(self._call):
            raise self._call.error(
                f"{what} when an earlier run stored it, and a step has taken it; the source has changed, or gives its "
                "rows in another order each time: order them, or start a new execution"
            )

    async def _around(self, fields: Mapping[str, Any], at: Sequence[str]) -> RowsAround:
        """Returns the fields around the rows; those that are too large for events are stored."""
        limit = self._tool_context.settings.inline_result_bytes
        large = {name for name, value in fields.items() if 4 * codec.byte_length(value) > limit}
        stored = {
            name: await self._tool_context.results.put(
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
        """Returns the selected fields, including those of the first chunk's rows."""
        if not select:
            return {}
        first = await self._tool_context.results.get(self._parts[0]) if self._parts else []
        paths = [path for path in select if ".-" not in path]
        whole = first if around is None else around.mapping(first, {})
        return codec.select_fields(whole, paths, self._tool_context.settings.inline_result_bytes)


class ChunkedResult:
    """Takes gathered rows and makes one result of them: a value if it is small, else chunks.

    Attributes:
        most_bytes: size of the pieces of a source that cuts its rows itself.
        chunk_bytes: size to gather; 0 if a step takes every addition as a chunk of its own.
        position: at which a producer that can seek resumes; None at the beginning, and for all others.
        wanted: a step takes the chunks as they come, so that a small result is one too.
    """

    def __init__(self, call: ToolCall, context: ToolContext) -> None:
        self._call = call
        self._tool_context = context
        self._writer: ChunkWriter | None = None
        self._rest: Any = []
        self.wanted = context.chunks.wanted(call)
        self.most_bytes = context.settings.chunk_bytes
        self.chunk_bytes = 0 if self.wanted else self.most_bytes
        self.position: Any = None

    async def seek(self) -> bool:
        """Finds the position of an earlier run of the call; returns False when nothing is left to do."""
        writer = await ChunkWriter.open(self._call, self._tool_context, seeks=True)
        if writer.stored and writer.position is None and not writer.is_whole:
            # it has no positions: the stored chunks are compared
            writer = await ChunkWriter.open(self._call, self._tool_context)
        self.position = writer.position
        if not writer.stored:
            return True  # a small result has no writer
        self._writer = writer
        return not writer.is_whole

    async def begin_again(self) -> None:
        """Compares the stored chunks, for a producer that cannot resume at ``position`` after all."""
        self.position = None
        self._writer = await ChunkWriter.open(self._call, self._tool_context)

    async def put(self, chunk: Gathered) -> bool:
        """Stores a chunk, or keeps it if it is all; returns False when an earlier run has stored everything."""
        if self._writer is None:
            if not (chunk.full or self.wanted):
                self._rest = chunk.rows
                return True
            self._writer = await ChunkWriter.open(self._call, self._tool_context)
        if self._writer.is_whole:
            return False
        await self._writer.put(chunk.rows, chunk.position)
        return True

    async def result(
        self,
        fields: Mapping[str, Any] | None = None,
        details: Mapping[str, Any] | None = None,
        *,
        at: str = "data",
    ) -> ToolResult:
        """Returns all rows, as a value if they are less than a chunk, else by reference.

        Args:
            fields: the result is a mapping of them and the rows under the key ``at``; else it is the rows.
            details: further parts of the envelope.
        """
        if self._writer is None and self.wanted and fields is not None:
            await self.put(Gathered([], full=False))  # a chunk without rows, so that the fields are no row
        envelope = dict(details or {})
        if self._writer is not None:
            return ToolResult(ref=await self._writer.finish(fields, (at,)), details=envelope)
        data = self._rest if fields is None else {**fields, at: self._rest}
        return ToolResult(data=data, details=envelope)
