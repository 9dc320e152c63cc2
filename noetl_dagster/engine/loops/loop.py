"""Loops inside one step: sequential, parallel and chunked (DSL section 8)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.chunks import IterationChunks
from noetl_dagster.engine.loops.collection import evaluate_collection, keep_collection, kept_collection
from noetl_dagster.engine.loops.gather import LoopResult, gather, iteration_ends
from noetl_dagster.engine.loops.issue import Activation, issue
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import ItemSource, SharedItems, SharedLoop, Tally
from noetl_dagster.events.state import assign
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


class Loops:
    """Runs the loop of a step to its end, going on where an interrupted run stopped."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attempts = Attempts(runtime)

    async def run(self, execution: Execution, program: StepProgram, visit: int) -> LoopResult:
        """Runs every iteration that has not been done yet.

        Raises:
            ToolError: the collection is not a list.
            TemplateError: the collection cannot be rendered.
        """
        activation = await self.activate(execution, program, visit)
        loop = program.step.loop
        assert loop is not None
        size = len(activation.items)
        chunks = await IterationChunks.of(self._runtime, activation, size)
        if loop.mode is LoopMode.SEQUENTIAL:
            if activation.resumed:
                await self.restore_context(activation, size)
            await self._run_range(activation, 0, size, 1, chunks, applies_context=True)
        elif loop.mode is LoopMode.CHUNKED:
            chunk = loop.chunk_size or loop.max_in_flight
            for start in range(0, size, chunk):
                await self._run_range(activation, start, min(start + chunk, size), loop.max_in_flight, chunks)
        else:
            await self._run_range(activation, 0, size, loop.max_in_flight, chunks)
        await self._runtime.buffer.flush()
        result = await gather(
            self._runtime,
            execution.id,
            activation.step,
            activation.loop_ids,
            size,
            sequences=program.retries,
        )
        await self.finish(activation, result)
        return result

    async def activate(
        self, execution: Execution, program: StepProgram, visit: int, *, shard: bool = False
    ) -> Activation:
        """The activation that goes on, or a new one with its ``loop.started`` event.

        An activation that ended with failures is continued by a new one, which inherits what was done:
        ``loop.done`` stays unique for each loop id.
        """
        step = program.step.name
        known = execution.state.loops.get((step, visit), [])
        loop_ids = tuple(entry.loop_id for entry in known)
        if known:
            items = kept_collection(self._runtime, known[-1].context)
            if not known[-1].done or known[-1].epoch == execution.state.epoch:
                return Activation(execution, program, visit, loop_ids, items, shard, resumed=True)
            context = known[-1].context
        else:
            scope = execution.scope(ReferenceCache(), step)
            evaluated = await evaluate_collection(self._runtime, program, scope)
        loop_id = str(self._runtime.ids.next())
        if not known:
            context, items = await keep_collection(
                self._runtime,
                execution,
                step,
                evaluated,
                loop_id,
                partitions=program.partitions if shard else None,
            )
        activation = Activation(
            execution, program, visit, (*loop_ids, loop_id), items, shard, resumed=bool(known)
        )
        await self.start(activation, context)
        return activation

    async def finish(self, activation: Activation, result: LoopResult) -> bool:
        """Writes ``loop.done``, or ``loop.fanin.completed``, once; true for the one who wrote it."""
        state = activation.execution.state
        counts = {key: result.envelope[key] for key in ("total", "done", "failed")}
        if activation.shard:
            status = fanin_status(result.done, result.failed)
            type_, shape = EventType.LOOP_FANIN_COMPLETED, {"status": status, "context": counts}
        else:
            status = "completed"
            counts["completed"] = counts["done"]
            type_, shape = EventType.LOOP_DONE, {"status": result.envelope["status"], "context": counts}
        meta = {"loop_id": activation.loop_id, "collection_size": len(activation.items), **counts}
        event = self._runtime.event(state, type_, activation.step, "loop", status, meta)
        event.result = shape
        state.apply(event)
        return await self._runtime.log.append_once(event)

    async def start(self, activation: Activation, context: dict[str, Any]) -> None:
        state = activation.execution.state
        loop = activation.program.step.loop
        assert loop is not None
        size = len(activation.items)
        meta: dict[str, Any] = {
            "loop_id": activation.loop_id,
            "visit": activation.visit,
            "epoch": state.epoch,
            "mode": loop.mode.value,
            ("total_shards" if activation.shard else "collection_size"): size,
        }
        if loop.mode is LoopMode.STREAM:
            meta["source"] = activation.execution.program.graph.fed_by(activation.step)
        if len(activation.loop_ids) > 1:
            meta["continues"] = activation.loop_ids[-2]
        type_ = EventType.LOOP_FANOUT_STARTED if activation.shard else EventType.LOOP_STARTED
        event = self._runtime.event(state, type_, activation.step, "loop", "started", meta)
        event.context, event.current_index = context, 0
        await self._runtime.buffer.append([event])
        state.apply(event)

    async def _run_range(
        self,
        activation: Activation,
        start: int,
        stop: int,
        concurrency: int,
        chunks: IterationChunks | None,
        *,
        applies_context: bool = False,
    ) -> None:
        """Runs the items of a range, so many at a time. Each iteration sees the context as it was issued."""
        with shared_items(self._runtime, activation, start, stop, concurrency) as items:
            await self.work(activation, items, chunks, applies_context=applies_context)

    async def work(
        self,
        activation: Activation,
        items: ItemSource,
        chunks: IterationChunks | None = None,
        *,
        applies_context: bool = False,
    ) -> Tally:
        """Runs this process's share of a loop's items.

        Args:
            chunks: is told of each result, where steps take them while the loop runs.
        """
        loop = activation.program.step.loop
        assert loop is not None
        commands = SharedCommands(self._runtime, activation, items)
        state = activation.execution.state

        async def work() -> None:
            while (found := await commands.next()) is not None:
                command, again = found
                outcome = await self._attempts.run(
                    activation.execution,
                    activation.program,
                    command,
                    issued=True,
                    resumed=again and activation.program.retries,
                )
                if applies_context:
                    for path, value in outcome.patches:
                        assign(state.ctx, path, value)
                if chunks is not None:
                    await chunks.tell(command, outcome.envelope)
                if outcome.failed and loop.fail_fast:
                    items.stop()

        return await items.run(work)

    async def restore_context(self, activation: Activation, stop: int) -> None:
        """Takes what the iterations before an interruption wrote to ctx into the state.

        Args:
            stop: the index after the last of them.
        """
        execution = activation.execution
        async for end in iteration_ends(
            self._runtime,
            execution.id,
            activation.loop_ids,
            0,
            stop,
            sequences=activation.program.retries,
        ):
            for path, value in end.patches:
                assign(execution.state.ctx, path, value)


def shared_items(
    runtime: Runtime, activation: Activation, start: int, stop: int, places: int
) -> AbstractContextManager[ItemSource]:
    """Who works on a range of a loop's items: this process, with helpers where its tools allow them."""
    program, execution = activation.program, activation.execution
    kinds = tuple(sorted({task.task.kind for task in program.tasks}))
    shared = SharedLoop(
        execution.id, activation.step, activation.visit, activation.loop_id, activation.shard, kinds
    )
    places = max(1, min(places, stop - start))
    helpers = runtime.helpers
    if helpers is None or runtime.runner_of(program) is not runtime.runner or program.keeps_to_driver:
        return nullcontext(SharedItems(shared, start, stop, places))
    return helpers.share(shared, start, stop, places)


class SharedCommands:
    """The commands of a share for its workers, which take turns only where a range ends.

    Beside each stands whether somebody may have run it before, so that the log is to be asked.
    """

    def __init__(self, runtime: Runtime, activation: Activation, items: ItemSource) -> None:
        self._runtime = runtime
        self._activation = activation
        self._items = items
        self._slices = self._issued()
        self._ready: deque[tuple[Command, bool]] = deque()
        self._lock = asyncio.Lock()
        self._pauses = 0
        self._going = asyncio.Event()
        self._going.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gives no further commands while something is found out that may end the loop."""
        self._pauses += 1
        self._going.clear()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._going.set()

    async def next(self) -> tuple[Command, bool] | None:
        if not self._going.is_set():
            await self._going.wait()
        if self._items.must_end():
            return None
        while not self._ready:
            async with self._lock:
                if self._ready:
                    break
                found = await anext(self._slices, None)
                if found is None:
                    self._slices = self._issued()  # what another process has left may come later
                    return None
                self._ready.extend(found)
        return self._ready.popleft()

    async def _issued(self) -> AsyncIterator[list[tuple[Command, bool]]]:
        while (taken := await self._items.take()) is not None:
            activation = replace(self._activation, resumed=True) if taken.again else self._activation
            async for commands in issue(self._runtime, activation, taken.start, taken.stop):
                yield [(command, activation.resumed) for command in commands]


async def run_workers(work: Any, count: int) -> None:
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


def fanin_status(done: int, failed: int) -> str:
    """``complete``, ``partial`` or ``failed`` (seed P3.2)."""
    if not failed:
        return "complete"
    return "partial" if done else "failed"
