"""Runs loops: iterations over a collection, over the rows of a cursor, or over the chunks of another step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from noetl_dagster.engine.loops.activation import Activation, activate, finish, restore_context
from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.chunks import IterationChunks
from noetl_dagster.engine.loops.gather import IterationEnd, LoopResult, gather
from noetl_dagster.engine.loops.issue import issue
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import ItemSource, SharedItems, SharedLoop, Tally
from noetl_dagster.events.state import assign
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram

Iterate = Callable[[Command, bool], Awaitable[Outcome]]
"""Runs one iteration. The flag: an earlier run may have begun it, so the log has to be read."""


class IterationSource(Protocol):
    """The source of a loop's commands."""

    activation: Activation

    @property
    def known(self) -> int:
        """The index after the last iteration that an earlier run may have done."""
        ...

    @property
    def stop_index(self) -> int | None:
        """The index after the last iteration, unless it follows from the number of items."""
        ...

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs every iteration that is not done, as many at a time as the loop allows."""
        ...

    def stop(self) -> None:
        """Begins no further iterations."""
        ...

    def counts(self, end: IterationEnd) -> bool:
        """Reports that an end in the log counts for the result of the loop."""
        ...


OpenSource = Callable[[Runtime, Execution, StepProgram, int], Awaitable[IterationSource]]


class Loops:
    """Runs the loop of a step to its end, resuming where an interrupted run stopped."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attempts = Attempts(runtime)

    async def run(
        self, open_source: OpenSource, execution: Execution, program: StepProgram, visit: int
    ) -> LoopResult:
        """Runs every iteration that has not been done yet.

        Raises:
            ToolError: the collection is not a list, or a cursor's claim failed.
            TemplateError: the collection cannot be rendered.
            StreamBrokenError: the step that makes the chunks failed; its chunks are done.
        """
        runtime, loop = self._runtime, program.loop
        source = await open_source(runtime, execution, program, visit)
        activation = source.activation
        chunks = await IterationChunks.of(runtime, activation, source.known)
        in_turn = loop.is_sequential and loop.cursor is None
        if in_turn and activation.resumed:
            await restore_context(runtime, activation, source.known)
        is_broken_by_failure = loop.fail_fast or (
            loop.mode is LoopMode.STREAM and chunks is not None and not loop.may_fail_in_part
        )

        async def iterate(command: Command, again: bool) -> Outcome:
            outcome = await self._run_one(activation, command, again)
            if in_turn:
                for path, value in outcome.patches:
                    assign(execution.state.ctx, path, value)
            if chunks is not None:
                await chunks.publish(command, outcome.envelope)
            if outcome.failed and is_broken_by_failure:
                source.stop()
            return outcome

        await source.run(iterate, chunks)
        await runtime.buffer.flush()
        result = await gather(
            runtime,
            execution.id,
            activation.step,
            activation.loop_ids,
            len(activation.items),
            stop=source.stop_index,
            sequences=program.retries,
            counts=source.counts,
        )
        await finish(runtime, activation, result)
        return result

    async def work(self, activation: Activation, items: ItemSource) -> Tally:
        """Runs the iterations of a helper process."""

        async def iterate(command: Command, again: bool) -> Outcome:
            outcome = await self._run_one(activation, command, again)
            if outcome.failed and activation.program.loop.fail_fast:
                items.stop()
            return outcome

        return await run_items(SharedCommands(self._runtime, activation, items), iterate)

    async def _run_one(self, activation: Activation, command: Command, again: bool) -> Outcome:
        program = activation.program
        return await self._attempts.run(
            activation.execution, program, command, issued=True, resumed=again and program.retries
        )


class CollectionSource:
    """Iterations over a collection: one after another, side by side, or chunk by chunk."""

    stop_index: int | None = None

    def __init__(self, runtime: Runtime, activation: Activation) -> None:
        self._runtime = runtime
        self._items: ItemSource | None = None
        self._stopped = False
        self.activation = activation
        self.known = len(activation.items)

    @classmethod
    async def open(
        cls, runtime: Runtime, execution: Execution, program: StepProgram, visit: int
    ) -> CollectionSource:
        """Opens the activation of a visit."""
        return cls(runtime, await activate(runtime, execution, program, visit))

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs the items. Each iteration sees the context as it was when its command was issued."""
        loop, size = self.activation.program.loop, self.known
        slots = 1 if loop.mode is LoopMode.SEQUENTIAL else loop.max_in_flight
        length = (loop.chunk_size or slots) if loop.mode is LoopMode.CHUNKED else max(1, size)
        for start in range(0, size, length):
            if self._stopped:
                return
            stop = min(start + length, size)
            with shared_items(self._runtime, self.activation, start, stop, slots) as self._items:
                await run_items(SharedCommands(self._runtime, self.activation, self._items), iterate)

    def stop(self) -> None:
        """Begins no further iterations."""
        self._stopped = True
        if self._items is not None:
            self._items.stop()

    def counts(self, end: IterationEnd) -> bool:
        """Counts every end."""
        return True


def shared_items(
    runtime: Runtime, activation: Activation, start: int, stop: int, slots: int
) -> AbstractContextManager[ItemSource]:
    """Opens a range of a loop's items, shared with helper processes where the step's tools allow it."""
    program, execution = activation.program, activation.execution
    kinds = tuple(sorted({task.task.kind for task in program.tasks}))
    loop = SharedLoop(
        execution.id, activation.step, activation.visit, activation.loop_id, activation.shard, kinds
    )
    slots = max(1, min(slots, stop - start))
    helpers = runtime.helpers
    if helpers is None or runtime.runner_of(program) is not runtime.runner or program.keeps_to_driver:
        return nullcontext(SharedItems(loop, start, stop, slots))
    return helpers.share(loop, start, stop, slots)


class SharedCommands:
    """The commands of one process's items, issued range by range.

    Each comes with a flag: another process may have run it before, so the log has to be read.
    """

    def __init__(self, runtime: Runtime, activation: Activation, items: ItemSource) -> None:
        self._runtime = runtime
        self._activation = activation
        self.items = items
        self._slices = self._issued()
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

    async def next(self) -> tuple[Command, bool] | None:
        """Returns the next command, or None when a coroutine has nothing more to do."""
        if not self._going.is_set():
            await self._going.wait()
        if self.items.must_end():
            return None
        while not self._ready:
            async with self._lock:
                if self._ready:
                    break
                found = await anext(self._slices, None)
                if found is None:
                    self._slices = self._issued()  # items of a process that is gone may come later
                    return None
                self._ready.extend(found)
        return self._ready.popleft()

    async def _issued(self) -> AsyncIterator[list[tuple[Command, bool]]]:
        while (taken := await self.items.take()) is not None:
            activation = replace(self._activation, resumed=True) if taken.again else self._activation
            async for commands in issue(self._runtime, activation, taken.start, taken.stop):
                yield [(command, activation.resumed) for command in commands]


async def run_items(commands: SharedCommands, iterate: Iterate) -> Tally:
    """Runs the commands of one process's items, and returns the counts of the other processes."""

    async def work() -> None:
        while (found := await commands.next()) is not None:
            await iterate(*found)

    return await commands.items.run(work)


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
