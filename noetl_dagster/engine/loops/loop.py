"""Runs loops: iterations over a collection, over the rows of a cursor, or over the chunks of another step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, filterfalse
from typing import Any

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.gather import IterationEnd, LoopResult, gather, iteration_ends
from noetl_dagster.engine.loops.loop_run import LoopRun, begin_loop, issue
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import ItemSource, SharedItems, SharedLoop, Tally
from noetl_dagster.events.envelopes import OK, Envelope
from noetl_dagster.events.state import assign
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Visit

Iterate = Callable[[Command, bool], Awaitable[Outcome]]
"""Runs one iteration. The flag: an earlier run may have begun it, so the log has to be read."""


class IterationChunks:
    """Publishes the results of a loop's iterations as chunks for other steps, one for each iteration.

    A loop that takes chunks itself gives its own the same numbers, which keeps their order. Other loops number them in
    the order in which they are made. ``published``: iterations whose chunks are in the log, or that have none.
    """

    def __init__(self, loop_run: LoopRun, published: dict[int, int | None]) -> None:
        loop = loop_run.program.loop
        self._streams = loop_run.runtime.streams
        self._ordered = loop.mode is LoopMode.STREAM
        self._publishes_failures = self._ordered and loop.may_fail_in_part
        self.published = set(published.values())
        self._free = filterfalse(published.__contains__, count())
        self._key = loop_run.key
        self._writing: deque[asyncio.Future[set[int]]] = deque()

    @classmethod
    async def of(cls, loop_run: LoopRun, stop: int) -> IterationChunks | None:
        """Returns None unless a step takes the loop's chunks. Publishes missing ones of iterations before ``stop``."""
        streams = loop_run.runtime.streams
        if streams.of(loop_run.key) is None:
            return None
        chunks = cls(loop_run, await streams.iterations(loop_run.key))
        replayed = loop_run.program.retries and loop_run.program.loop.cursor is None
        if loop_run.resumed and not replayed:
            async for end in iteration_ends(loop_run, stop):
                if not end.failed:
                    await chunks.publish(loop_run.iteration(end.index, None, end.attempt), end.envelope)
        return chunks

    async def skip(self, command: Command) -> None:
        """Records that the loop makes nothing of a chunk that it takes."""
        if command.index is not None and command.index not in self.published:
            self.published.add(command.index)
            await self._streams.skip(command, command.index)

    async def publish(self, command: Command, envelope: Envelope) -> None:
        """Publishes the result of a successful iteration once; returns when there is room for another chunk.

        The chunk may not be in the log by then. Raises the failure of an earlier one.
        """
        if command.index in self.published or (envelope["status"] != OK and not self._publishes_failures):
            return
        number = command.index if self._ordered else next(self._free)
        assert number is not None
        self.published.add(command.index)
        self._writing.append(self._streams.begin_iteration(command, number, envelope))
        while self._writing[0].done() and len(self._writing) > 1:
            self._writing.popleft().result()
        await self._streams.room(self._key)

    async def written(self) -> None:
        """Waits until all chunks are in the log."""
        while self._writing:
            await self._writing.popleft()


class IterationSource:
    """The source of a loop's commands.

    Attributes:
        earlier_stop: the index after the last iteration that an earlier run may have done.
        stop_index: the index after the last iteration, unless it follows from the number of items.
    """

    stop_index: int | None = None

    def __init__(self, loop_run: LoopRun, earlier_stop: int) -> None:
        self.loop_run = loop_run
        self.earlier_stop = earlier_stop
        self._runtime = loop_run.runtime
        self._stopped = False

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs every iteration that is not done, as many at a time as the loop allows."""
        raise NotImplementedError

    def stop(self) -> None:
        """Begins no further iterations."""
        self._stopped = True

    def counts(self, end: IterationEnd) -> bool:
        """Reports that an end in the log counts for the result of the loop."""
        return True


OpenSource = Callable[[Runtime, Visit], Awaitable[IterationSource]]


async def run_loop(runtime: Runtime, open_source: OpenSource, visit: Visit) -> LoopResult:
    """Runs the loop of a step to its end: every iteration that has not been done yet.

    Raises:
        ToolError, TemplateError: there is no collection, or a cursor's claim failed.
        StreamBrokenError: the step that makes the chunks failed; its chunks are done.
    """
    program, loop, ctx = visit.program, visit.program.loop, visit.execution.state.ctx
    source = await open_source(runtime, visit)
    loop_run = source.loop_run
    chunks = await IterationChunks.of(loop_run, source.earlier_stop)
    in_turn = loop.is_sequential and loop.cursor is None
    if in_turn and loop_run.resumed:  # the iterations before the interruption wrote to ctx
        async for end in iteration_ends(loop_run, source.earlier_stop, sequences=program.retries):
            for path, value in end.patches:
                assign(ctx, path, value)
    is_broken_by_failure = loop.fail_fast or (
        loop.mode is LoopMode.STREAM and chunks is not None and not loop.may_fail_in_part
    )

    async def iterate(command: Command, again: bool) -> Outcome:
        outcome = await _run_one(loop_run, command, again)
        if in_turn:
            for path, value in outcome.patches:
                assign(ctx, path, value)
        if chunks is not None:
            await chunks.publish(command, outcome.envelope)
        if outcome.failed and is_broken_by_failure:
            source.stop()
        return outcome

    try:
        await source.run(iterate, chunks)
    finally:
        if chunks is not None:
            await chunks.written()
    await runtime.buffer.flush(loop_run.execution.id)
    stop, sequences = source.stop_index, program.retries
    return await gather(loop_run, stop=stop, sequences=sequences, counts=source.counts)


async def work_on_loop(loop_run: LoopRun, items: ItemSource) -> Tally:
    """Runs the iterations of a helper process."""

    async def iterate(command: Command, again: bool) -> Outcome:
        outcome = await _run_one(loop_run, command, again)
        if outcome.failed and loop_run.program.loop.fail_fast:
            items.stop()
        return outcome

    return await SharedCommands(loop_run, items).run(iterate)


async def _run_one(loop_run: LoopRun, command: Command, again: bool) -> Outcome:
    attempts = Attempts(loop_run.runtime, loop_run, command)
    return await attempts.run(issued=True, resumed=again and loop_run.program.retries)


class CollectionSource(IterationSource):
    """Iterations over a collection: one after another, side by side, or chunk by chunk."""

    _items: ItemSource | None = None

    @classmethod
    async def open(cls, runtime: Runtime, visit: Visit) -> CollectionSource:
        """Opens the loop run of a visit."""
        loop_run = await begin_loop(runtime, visit)
        return cls(loop_run, len(loop_run.items))

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs the items. Each iteration sees the context as it was when its command was issued."""
        loop, size = self.loop_run.program.loop, self.earlier_stop
        slots = 1 if loop.mode is LoopMode.SEQUENTIAL else loop.max_in_flight
        length = (loop.chunk_size or slots) if loop.mode is LoopMode.CHUNKED else max(1, size)
        for start in range(0, size, length):
            if self._stopped:
                return
            stop = min(start + length, size)
            with shared_items(self.loop_run, start, stop, slots) as self._items:
                await SharedCommands(self.loop_run, self._items).run(iterate)

    def stop(self) -> None:
        """Begins no further iterations, in any process."""
        super().stop()
        if self._items is not None:
            self._items.stop()


def shared_items(loop_run: LoopRun, start: int, stop: int, slots: int) -> AbstractContextManager[ItemSource]:
    """Opens a range of a loop's items, shared with helper processes where the step's tools allow it."""
    runtime, program, shard = loop_run.runtime, loop_run.program, loop_run.shard
    kinds = tuple(sorted({task.task.kind for task in program.tasks}))
    loop = SharedLoop(*loop_run.key, loop_run.loop_id, shard, loop_run.resumed, kinds)
    slots = max(1, min(slots, stop - start))
    helpers = runtime.helpers
    if helpers is None or runtime.runner_of(program) is not runtime.runner or program.keeps_to_driver:
        return nullcontext(SharedItems(loop, start, stop, slots))
    return helpers.share(loop, start, stop, slots, loop_run.execution.services.processes)


class SharedCommands:
    """The commands of one process's items. The flag is that of :data:`Iterate`.

    They are issued range by range, each while the one before it runs.
    """

    def __init__(self, loop_run: LoopRun, items: ItemSource) -> None:
        self._loop_run = loop_run
        self._items = items
        self._slices = self._issued()
        self._ahead: asyncio.Task[list[tuple[Command, bool]] | None] | None = None
        self._ready: deque[tuple[Command, bool]] = deque()
        self._lock = asyncio.Lock()
        self._pauses = 0
        self._going = asyncio.Event()
        self._going.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns no further commands during a check that may end the loop."""
        self._pauses += 1
        self._going.clear()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._going.set()

    async def run(self, iterate: Iterate) -> Tally:
        """Runs the commands, and returns the counts of the other processes."""

        async def work() -> None:
            while (following := await self._next()) is not None:
                await iterate(*following)

        try:
            return await self._items.run(work)
        finally:
            if self._ahead is not None:
                await cancel_and_wait(self._ahead)

    async def _next(self) -> tuple[Command, bool] | None:
        """Returns the next command, or None when a coroutine has nothing more to do."""
        if not self._going.is_set():
            await self._going.wait()
        if self._items.must_end():
            return None
        while not self._ready:
            async with self._lock:
                if self._ready:
                    break
                commands = await self._slice()
                if commands is None:
                    return None
                self._ready.extend(commands)
        return self._ready.popleft()

    async def _slice(self) -> list[tuple[Command, bool]] | None:
        """Returns the next commands, and begins to issue those after them."""
        ahead, self._ahead = self._ahead, None
        commands = None if ahead is None else await ahead
        if commands is None:
            if ahead is not None:
                self._slices = self._issued()  # items of a process that is gone may have come meanwhile
            commands = await anext(self._slices, None)
        if commands is None:
            self._slices = self._issued()
            return None
        self._ahead = asyncio.create_task(self._following())
        return commands

    async def _following(self) -> list[tuple[Command, bool]] | None:
        return await anext(self._slices, None)

    async def _issued(self) -> AsyncIterator[list[tuple[Command, bool]]]:
        while (taken := await self._items.take()) is not None:
            loop_run = replace(self._loop_run, resumed=True) if taken.again else self._loop_run
            async for commands in issue(loop_run, taken.start, taken.stop):
                yield [(command, loop_run.resumed) for command in commands]


async def run_side_by_side(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Runs ``count`` copies of a coroutine function; one that raises ends the others."""
    if count == 1:
        await work()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
