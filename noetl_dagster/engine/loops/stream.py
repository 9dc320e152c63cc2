"""Iterations over the chunks of another step, which arrive while the loop runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from noetl_dagster.engine.loops.collection import Collection
from noetl_dagster.engine.loops.loop import Iterate, IterationChunks, IterationSource, run_side_by_side
from noetl_dagster.engine.loops.loop_run import SLICE, LoopRun, begin_loop, issue
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.playbook.templates.chunks import ChunkView
from noetl_dagster.playbook.templates.rendering import Compiled, with_references
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.worker.chunks import ChunkStream, ChunkStreams
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Visit


class StreamBrokenError(NoetlError):
    """The step that makes the chunks has failed, so the steps that take them cannot end."""


class _Chunks(Collection):
    """The chunks in the log as the items of a loop."""

    def __init__(self, streams: ChunkStreams, stream: ChunkStream) -> None:
        super().__init__()
        self._streams = streams
        self._stream = stream

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        return await self._streams.items(self._stream, start, stop)


class ChunkSource(IterationSource):
    """The commands of the chunks that arrive, in order, until the producer has ended and its last chunk is done.

    Commands are issued while those before them run.
    """

    def __init__(self, loop_run: LoopRun, stream: ChunkStream) -> None:
        super().__init__(loop_run, stream.published)
        self._stream = stream
        self._own: IterationChunks | None = None
        self._ready: deque[tuple[Command, bool]] = deque()
        self._open: set[int] = set()
        self._position = 0
        self._all_issued = False
        self._lock = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._when = _condition(loop_run, stream.key[1])

    @classmethod
    async def open(cls, runtime: Runtime, visit: Visit) -> ChunkSource:
        """Opens the loop run of a visit whose producer runs in this process."""
        source = visit.execution.program.graph.fed_by.get(visit.step)
        assert source is not None
        key = (visit.execution.id, source, visit.number)
        stream = runtime.streams.of(key)
        assert stream is not None, f"the steps {source} and {visit.step} are walked together"
        return cls(await begin_loop(runtime, visit, items=_Chunks(runtime.streams, stream)), stream)

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs the chunks as they arrive; raises :class:`StreamBrokenError` after the last if the producer failed."""
        self._own = chunks

        async def work() -> None:
            while (following := await self._next()) is not None:
                await iterate(*following)
                self._open.discard(following[0].index or 0)  # those before it may not be done
                self._report_progress()

        issuing = asyncio.create_task(self._issue_arriving())
        try:
            await run_side_by_side(work, self.loop_run.program.loop.max_in_flight)
            if not self._stopped:
                await issuing
        finally:
            await cancel_and_wait(issuing)
        self.stop_index, source = self._stream.published, self._stream.key[1]
        if self._stream.has_failed:
            raise StreamBrokenError(f"step {self.loop_run.step}: {source}, whose chunks it takes, has failed")

    def stop(self) -> None:
        """Begins no further iterations."""
        super().stop()
        self._arrived.set()

    async def _next(self) -> tuple[Command, bool] | None:
        async with self._lock:
            while not (self._ready or self._stopped or self._all_issued):
                self._arrived.clear()
                self._stream.waiting += 1
                self._runtime.buffer.hurry()
                try:
                    await self._arrived.wait()
                finally:
                    self._stream.waiting -= 1
            return self._ready.popleft() if self._ready and not self._stopped else None

    async def _issue_arriving(self) -> None:
        """Issues chunks as they arrive, until the producer has ended."""
        try:
            while self._position < self._stream.published or not self._stream.has_ended:
                if self._position < self._stream.published:
                    await self._issue(self._position, min(self._position + SLICE, self._stream.published))
                else:
                    await self._stream.changed()
        finally:
            self._all_issued = True
            self._arrived.set()

    async def _issue(self, start: int, stop: int) -> None:
        """Issues the commands of chunks that are in the log, without those that are done or do not match."""
        resumed = self.loop_run.resumed
        for first, last in await self._wanted(start, stop):
            async for commands in issue(self.loop_run, first, last, urgent=not self._ready):
                self._open.update(command.index or 0 for command in commands)
                self._ready.extend((command, resumed) for command in commands)
                self._arrived.set()
        self._position = stop
        self._report_progress()

    async def _wanted(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns half-open ranges of the chunks that the arc's ``when`` lets pass and that hold something.

        The result of a chunk is final once it is published, also when it failed and is skipped.
        """
        ranges, first = [], start
        for number, item in enumerate(await self.loop_run.items.slice(start, stop), start):
            published = self._own is not None and number in self._own.published
            if not published and "left_out" not in item and await self._passes(item):
                continue
            if first < number:
                ranges.append((first, number))
            first = number + 1
            if self._own is not None and not published:
                await self._own.skip(self.loop_run.iteration(number, None))
        if first < stop:
            ranges.append((first, stop))
        return ranges

    async def _passes(self, item: dict[str, Any]) -> bool:
        if self._when is None:
            return True
        cache, source = ReferenceCache(), self._stream.key[1]
        view = ChunkView(item, cache)
        names = {"event": {"name": "call.partial", "step": source, "payload": view}, "output": view}
        names[self.loop_run.program.loop.iterator] = view
        scope = self.loop_run.execution.scope(cache, source).with_locals(names)
        return await with_references(self._runtime.results.get, self._when.holds, scope)

    def _report_progress(self) -> None:
        """Reports to the stream how many chunks are done, counted from the first without a gap."""
        self._stream.consumed(self.loop_run.step, min(self._open, default=self._position))


def _condition(loop_run: LoopRun, source: str) -> Compiled | None:
    """Returns ``when`` of the arc that feeds a step, or None where each chunk passes."""
    feeding = loop_run.execution.program.step(source)
    for arc, (when, _) in zip(feeding.step.routing.arcs, feeding.arcs, strict=True):
        if arc.is_stream and arc.step == loop_run.step:
            return None if arc.when in (None, True) else when
    return None
