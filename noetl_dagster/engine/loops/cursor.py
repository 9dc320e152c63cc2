"""Cursor loops: each slot claims rows by SQL, processes them, and claims again until there are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.collection import Collection
from noetl_dagster.engine.loops.gather import LoopResult, gather
from noetl_dagster.engine.loops.issue import Activation, issue_events
from noetl_dagster.engine.loops.loop import Loops, run_workers
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, ToolError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import CursorSpec, FrameSpec, Task
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram

T = TypeVar("T")

LATE_CLAIM_SECONDS = 10.0
"""A loop that is stopped waits so long for its claim, whose rows would be nobody's otherwise."""


class CursorLoops:
    """Runs loops whose items are claimed while they run. The claims themselves remember what is done."""

    def __init__(self, runtime: Runtime, loops: Loops) -> None:
        self._runtime = runtime
        self._loops = loops
        self._attempts = Attempts(runtime)

    async def run(self, execution: Execution, program: StepProgram, visit: int) -> LoopResult:
        """Runs until every slot's claim returned no rows.

        Raises:
            ToolError: the claim failed.
        """
        loop = program.step.loop
        assert loop is not None
        assert loop.cursor is not None
        known = execution.state.loops.get((program.step.name, visit), [])
        loop_ids = (*(entry.loop_id for entry in known), str(self._runtime.ids.next()))
        activation = Activation(execution, program, visit, loop_ids, Collection())
        await self._loops.start(activation, {})
        indexes = count(sum(entry.size for entry in known))
        claim = _Claim(self._runtime, execution, program, loop.cursor, loop.frame)

        async def take() -> list[Command]:
            commands = [self._command(activation, next(indexes), row) for row in await claim.rows()]
            await self._issue(activation, commands)
            return commands

        async def slot() -> None:
            while commands := await _to_its_end(take()):
                await self._run(execution, program, commands, loop.frame.row_concurrency)

        await run_workers(slot, loop.max_in_flight)
        await self._runtime.buffer.flush()
        total = next(indexes)
        result = await gather(
            self._runtime, execution.id, activation.step, loop_ids, total, sequences=program.retries
        )
        await self._loops.finish(activation, result)
        return result

    def _command(self, activation: Activation, index: int, row: Any) -> Command:
        state = activation.execution.state
        return Command(
            execution_id=state.execution_id,
            step=activation.step,
            visit=activation.visit,
            attempt=len(activation.loop_ids),
            index=index,
            item=row,
            loop_id=activation.loop_id,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
        )

    async def _issue(self, activation: Activation, commands: list[Command]) -> None:
        runtime = self._runtime
        events = [event for command in commands for event in issue_events(runtime, activation, command)]
        try:
            await runtime.buffer.append(events)
        except ExecutionCancelledError:  # the claim had committed: the log says what became of its rows
            kept = [event for event in events if event.event_type == EventType.LOOP_ITEM]
            ends = [runtime.commands.cancelled(command, "its row had been claimed") for command in commands]
            await runtime.buffer.append([*kept, *ends])
            raise

    async def _run(
        self, execution: Execution, program: StepProgram, commands: list[Command], concurrency: int
    ) -> None:
        waiting = iter(commands)

        async def work() -> None:
            for command in waiting:
                await self._attempts.run(execution, program, command, issued=True)

        await run_workers(work, min(concurrency, len(commands)))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that should not stop half done: who is cancelled meanwhile stops when it has ended."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=LATE_CLAIM_SECONDS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # nobody asks for its outcome any more
            await task
        raise


class _Claim:
    """The claim of a cursor loop. Its SQL may name its bounds: ``:__frame_max_rows``, or as a template."""

    def __init__(
        self,
        runtime: Runtime,
        execution: Execution,
        program: StepProgram,
        cursor: CursorSpec,
        frame: FrameSpec,
    ) -> None:
        self._runtime = runtime
        self._execution = execution
        self._step = program.step.name
        self._cursor = cursor
        self._frame = frame
        self._sql = compile_value(cursor.claim)
        self._auth = compile_value(cursor.auth)

    async def rows(self) -> list[Any]:
        cache, fetch = ReferenceCache(), self._runtime.results.get
        frame = {f"__frame_{name}": value for name, value in self._frame.model_dump().items()}
        scope = self._execution.scope(cache, self._step).with_locals(frame)
        call = ToolCall(
            execution_id=self._execution.id,
            step=self._step,
            task=Task(name="claim", kind=self._cursor.kind),
            config={"command": await render_async(self._sql, scope, fetch)},
            input=frame,
            auth=await render_async(self._auth, scope, fetch),
            scope=scope,
            folder=self._execution.folder,
        )
        async with asyncio.timeout(self._frame.max_seconds):
            result = await tool_for(self._cursor.kind).run(call, self._runtime.box)
        rows = result.data.get("rows") if isinstance(result.data, dict) else None
        if rows is None:
            raise ToolError(
                f"step {self._step}: loop.cursor.claim returned no rows at all; "
                "end it with a SELECT or a RETURNING clause",
                kind="loop",
            )
        if self._frame.max_bytes is not None and len(encode_json(rows)) > self._frame.max_bytes:
            raise ToolError(
                f"step {self._step}: one claim returned more than frame.max_bytes "
                f"({self._frame.max_bytes}); claim fewer rows with LIMIT {{{{ __frame_max_rows }}}}",
                kind="loop",
            )
        return list(rows)
