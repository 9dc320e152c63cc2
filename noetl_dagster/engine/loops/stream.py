"""Streams: a step that takes the chunks of another one, and iterations that are chunks for others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.chunks import IterationChunks
from noetl_dagster.engine.loops.collection import Collection
from noetl_dagster.engine.loops.gather import LoopResult, gather
from noetl_dagster.engine.loops.issue import SLICE, Activation, issue
from noetl_dagster.engine.loops.loop import Loops, run_workers
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.state import assign
from noetl_dagster.playbook.templates.chunks import ChunkView
from noetl_dagster.playbook.templates.rendering import Condition, holds_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.worker.chunks import Place, Stream, Streams
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


class StreamBrokenError(NoetlError):
    """The step that makes the chunks has failed; who takes them cannot end."""


class StreamLoops:
    """Runs steps that take chunks while another step makes them."""

    def __init__(self, runtime: Runtime, loops: Loops) -> None:
        self._runtime = runtime
        self._loops = loops
        self._attempts = Attempts(runtime)

    async def run(self, execution: Execution, program: StepProgram, visit: int) -> LoopResult:
        """Runs until the producer has ended and its last chunk is done.

        Raises:
            StreamBrokenError: the producer failed, and what it had made is done.
        """
        loop = program.step.loop
        assert loop is not None
        step = program.step.name
        source = execution.program.graph.fed_by(step)
        assert source is not None
        place = (execution.id, source, visit)
        stream = self._runtime.streams.of(place)
        assert stream is not None, f"the steps {source} and {step} are walked together"
        activation = await self._activate(execution, program, visit, place)
        own = await IterationChunks.of(self._runtime, activation, stream.told)
        arriving = _Arriving(self._runtime, activation, stream, place, own)
        if loop.is_sequential and activation.resumed:
            await self._loops.restore_context(activation, stream.told)

        async def work() -> None:
            while (found := await arriving.next()) is not None:
                command, again = found
                outcome = await self._attempts.run(
                    execution, program, command, issued=True, resumed=again and program.retries
                )
                if loop.is_sequential:
                    for path, value in outcome.patches:
                        assign(execution.state.ctx, path, value)
                if own is not None:
                    await own.tell(command, outcome.envelope)
                if outcome.failed and (loop.fail_fast or (own is not None and not loop.may_fail_in_part)):
                    arriving.stop()
                arriving.ended(command)

        await run_workers(work, loop.max_in_flight)
        if arriving.is_broken:
            raise StreamBrokenError(f"step {step}: {source}, whose chunks it takes, has failed")
        await self._runtime.buffer.flush()
        result = await gather(
            self._runtime,
            execution.id,
            step,
            activation.loop_ids,
            0,
            stop=stream.told,
            sequences=program.retries,
        )
        await self._loops.finish(activation, result)
        return result

    async def _activate(
        self, execution: Execution, program: StepProgram, visit: int, place: Place
    ) -> Activation:
        """The activation that goes on, or a new one; as of loops whose items are known beforehand."""
        known = execution.state.loops.get((program.step.name, visit), [])
        loop_ids = tuple(entry.loop_id for entry in known)
        items = _Chunks(self._runtime.streams, place)
        if known and not (known[-1].done and known[-1].epoch < execution.state.epoch):
            return Activation(execution, program, visit, loop_ids, items, resumed=True)
        loop_id = str(self._runtime.ids.next())
        activation = Activation(execution, program, visit, (*loop_ids, loop_id), items, resumed=bool(known))
        await self._loops.start(activation, {})
        return activation


class _Chunks(Collection):
    """The chunks in the log as the items of a loop; how many there will be is not known."""

    def __init__(self, streams: Streams, place: Place) -> None:
        super().__init__()
        self._streams = streams
        self._place = place

    @property
    def length(self) -> int | None:
        return None

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        return await self._streams.items(self._place, start, stop)


class _Arriving:
    """The commands of the chunks that arrive, in order, for the workers of a loop that takes turns at them.

    Beside each stands whether somebody may have run it before, so that the log is to be asked.
    """

    def __init__(
        self,
        runtime: Runtime,
        activation: Activation,
        stream: Stream,
        place: Place,
        own: IterationChunks | None,
    ) -> None:
        self._runtime = runtime
        self._own = own
        self._activation = activation
        self._stream = stream
        self._place = place
        self._ready: deque[tuple[Command, bool]] = deque()
        self._open: set[int] = set()
        self._position = 0
        self._stopped = False
        self._lock = asyncio.Lock()
        self._when = _condition(activation)

    @property
    def is_broken(self) -> bool:
        """Whether the producer ended without having made all of its chunks."""
        return self._stream.has_failed

    def stop(self) -> None:
        """Gives no further commands."""
        self._stopped = True

    def ended(self, command: Command) -> None:
        """A chunk is done. Those before it may not be."""
        self._open.discard(command.index or 0)
        self._settle()

    async def next(self) -> tuple[Command, bool] | None:
        async with self._lock:
            while not self._ready and not self._stopped:
                if self._position < self._stream.told:
                    await self._issue(self._position, min(self._position + SLICE, self._stream.told))
                elif self._stream.has_ended:
                    return None
                else:
                    await self._stream.changed()
            return None if self._stopped else self._ready.popleft()

    async def _issue(self, start: int, stop: int) -> None:
        """Issues the commands of chunks that are in the log, but for those that are done or not wanted."""
        resumed = self._activation.resumed
        for first, last in await self._wanted(start, stop):
            async for commands in issue(self._runtime, self._activation, first, last):
                self._ready.extend((command, resumed) for command in commands)
                self._open.update(command.index or 0 for command in commands)
        self._position = stop
        self._settle()

    async def _wanted(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Runs of chunks, half-open, which the arc's ``when`` lets pass and of which there is something.

        What was made of a chunk stands once others have been told of it, also that it failed and is left out.
        """
        runs, first = [], start
        for number, item in enumerate(await self._activation.items.slice(start, stop), start):
            told = self._own is not None and self._own.has_told(number)
            if not told and "left_out" not in item and await self._passes(item):
                continue
            if first < number:
                runs.append((first, number))
            first = number + 1
            if self._own is not None and not told:
                await self._own.leave_out(self._activation.command(number, None))
        if first < stop:
            runs.append((first, stop))
        return runs

    async def _passes(self, item: dict[str, Any]) -> bool:
        if self._when is None:
            return True
        cache = ReferenceCache()
        execution, step = self._activation.execution, self._activation.program.step
        assert step.loop is not None
        view = ChunkView(item, cache)
        names = {"event": {"name": "call.partial", "step": self._place[1], "payload": view}, "output": view}
        scope = execution.scope(cache, self._place[1]).with_locals({**names, step.loop.iterator: view})
        return await holds_async(self._when, scope, self._runtime.results.get)

    def _settle(self) -> None:
        """Tells the stream how many chunks are done from the first on."""
        done = min(self._open, default=self._position)
        self._stream.take(self._activation.step, done)


def _condition(activation: Activation) -> Condition | None:
    """``when`` of the arc that feeds a step; None where each chunk passes."""
    program = activation.execution.program
    source = program.graph.fed_by(activation.step)
    assert source is not None
    feeding = program.step(source)
    for arc, (when, _) in zip(feeding.step.routing.arcs, feeding.arcs, strict=True):
        if arc.is_stream and arc.step == activation.step:
            return None if arc.when in (None, True) else when
    return None
