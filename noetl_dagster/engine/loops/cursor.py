"""Cursor loops: each slot claims rows by SQL, processes them, and claims again until there are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.chunks import IterationChunks
from noetl_dagster.engine.loops.collection import Collection
from noetl_dagster.engine.loops.frames import OWN_TRANSACTION, RELEASED, Frames, is_unfinished, release_frames
from noetl_dagster.engine.loops.gather import IterationEnd, LoopResult, gather
from noetl_dagster.engine.loops.issue import Activation, issue_events
from noetl_dagster.engine.loops.loop import Loops, run_workers
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, ToolError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.queries import LOOP_NEXT_INDEX
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import CursorSpec, FrameProcess, FrameSpec, Task
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.running import prepare_statements, run_statements
from noetl_dagster.worker.command import Command, Outcome
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
        if known:
            await release_frames(self._runtime, execution.id, loop_ids)
        activation = Activation(execution, program, visit, loop_ids, Collection())
        await self._loops.start(activation, {})
        claim = _Claim(self._runtime, activation, loop.cursor, loop.frame)
        first_index = await self._runtime.pool.fetchval(LOOP_NEXT_INDEX, execution.id, loop_ids)
        chunks = await IterationChunks.of(self._runtime, activation, first_index)
        if loop.cursor.release is None:
            taking = _Taking(self._runtime, activation, claim, first_index)
        else:
            taking = _KeptTaking(self._runtime, activation, claim, first_index)

        stopped = False

        async def slot() -> None:
            nonlocal stopped
            while not stopped and (commands := await _to_its_end(taking.take())):
                outcomes = await self._run(execution, program, commands, loop.frame.row_concurrency, chunks)
                await taking.ended(commands, outcomes)
                stopped = stopped or (loop.fail_fast and any(outcome.failed for outcome in outcomes))

        async with taking.held():
            await run_workers(slot, loop.max_in_flight)
        await self._runtime.buffer.flush()

        def counts(end: IterationEnd) -> bool:
            """Rows that were given back are claimed again; failures of an earlier activation were its own."""
            if not end.failed:
                return True
            return bool(end.index >= first_index and end.envelope["error"].get("code") != RELEASED)

        result = await gather(
            self._runtime,
            execution.id,
            activation.step,
            loop_ids,
            0,
            sequences=program.retries,
            counts=counts,
        )
        await self._loops.finish(activation, result)
        return result

    async def _run(
        self,
        execution: Execution,
        program: StepProgram,
        commands: list[Command],
        concurrency: int,
        chunks: IterationChunks | None,
    ) -> list[Outcome]:
        waiting = iter(commands)
        outcomes: list[Outcome] = []

        async def work() -> None:
            for command in waiting:
                outcome = await self._attempts.run(execution, program, command, issued=True)
                if chunks is not None:
                    await chunks.tell(command, outcome.envelope)
                outcomes.append(outcome)

        await run_workers(work, min(concurrency, len(commands)))
        return outcomes


class _Taking:
    """Takes rows with a claim and issues their commands."""

    def __init__(self, runtime: Runtime, activation: Activation, claim: _Claim, next_index: int) -> None:
        self._runtime = runtime
        self._activation = activation
        self._claim = claim
        self._next_index = next_index

    async def take(self) -> list[Command]:
        """Claims; the commands of what it got, which are in the log. None when there is nothing left."""
        commands = self._commands(await self._claim.rows())
        await self._issue(commands)
        return commands

    async def ended(self, commands: list[Command], outcomes: list[Outcome]) -> None:
        """Called when all commands of a claim have ended."""

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Lasts as long as the loop works."""
        yield

    def _commands(self, rows: list[Any]) -> list[Command]:
        loop = self._activation.program.step.loop
        assert loop is not None
        items = rows if loop.frame.process is FrameProcess.ROW else [rows] if rows else []
        first = self._next_index
        self._next_index += len(items)
        return [self._command(index, item) for index, item in enumerate(items, first)]

    def _command(self, index: int, item: Any) -> Command:
        activation = self._activation
        state = activation.execution.state
        return Command(
            execution_id=state.execution_id,
            step=activation.step,
            visit=activation.visit,
            attempt=len(activation.loop_ids),
            index=index,
            item=item,
            loop_id=activation.loop_id,
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
        )

    def _issue_events(self, commands: list[Command]) -> list[Event]:
        return [
            event for command in commands for event in issue_events(self._runtime, self._activation, command)
        ]

    async def _issue(self, commands: list[Command]) -> None:
        runtime = self._runtime
        events = self._issue_events(commands)
        try:
            await runtime.buffer.append(events)
        except ExecutionCancelledError:  # the claim had committed: the log says what became of its rows
            kept = [event for event in events if event.event_type == EventType.LOOP_ITEM]
            ends = [runtime.commands.cancelled(command, "its row had been claimed") for command in commands]
            await runtime.buffer.append([*kept, *ends])
            raise


class _KeptTaking(_Taking):
    """As :class:`_Taking`, for a cursor that gives rows back: what is claimed is known before it is claimed."""

    def __init__(self, runtime: Runtime, activation: Activation, claim: _Claim, next_index: int) -> None:
        super().__init__(runtime, activation, claim, next_index)
        loop = activation.program.step.loop
        assert loop is not None
        self._frames = Frames(runtime, activation, loop.frame)
        self._by_row = loop.frame.process is FrameProcess.ROW

    async def take(self) -> list[Command]:
        async with self._claim.taking() as (rows, xid):
            commands = self._commands(rows)
            if commands:
                events = self._issue_events(commands)
                await self._frames.keep(rows, commands[0].index or 0, xid, events, by_row=self._by_row)
        return commands

    async def ended(self, commands: list[Command], outcomes: list[Outcome]) -> None:
        """Rows that were nobody's work in the end are given back when the loop is over, and not claimed by it again."""
        if not any(is_unfinished(outcome.envelope) for outcome in outcomes):
            await self._frames.forget(commands[0].index or 0)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps the leases, and gives back what is left at the end. Who is cancelled leaves that to others."""
        async with self._frames.beating():
            try:
                yield
            except Exception:
                await self._give_back()
                raise
            await self._give_back()

    async def _give_back(self) -> None:
        await self._runtime.buffer.flush()
        await release_frames(self._runtime, self._activation.execution.id, self._activation.loop_ids)


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
        self, runtime: Runtime, activation: Activation, cursor: CursorSpec, frame: FrameSpec
    ) -> None:
        self._runtime = runtime
        self._execution = activation.execution
        self._step = activation.step
        self._cursor = cursor
        self._frame = frame
        self._sql = compile_value(cursor.claim)
        self._auth = compile_value(cursor.auth)

    async def rows(self) -> list[Any]:
        """Claims in a transaction of its own."""
        call = await self._call()
        async with asyncio.timeout(self._frame.max_seconds):
            result = await tool_for(self._cursor.kind).run(call, self._runtime.box)
        return self._rows_of(result.data)

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[tuple[list[Any], int]]:
        """Claims in a transaction that commits when the block ends; the rows, and the transaction's number."""
        async with contextlib.AsyncExitStack() as block:
            try:
                taken = await block.enter_async_context(self._taking())
            except asyncpg.InvalidCachedStatementError:  # another session changed a table; nothing was done
                taken = await block.enter_async_context(self._taking())
            yield taken

    @asynccontextmanager
    async def _taking(self) -> AsyncIterator[tuple[list[Any], int]]:
        call, box = await self._call(), self._runtime.box
        statements = await prepare_statements(call, box)
        with postgres_errors(call, box):
            pool = await open_pool(call, box)
            async with pool.acquire() as connection, connection.transaction():
                async with asyncio.timeout(self._frame.max_seconds):
                    xid = await connection.fetchval(OWN_TRANSACTION)
                    data = await run_statements(connection, statements)
                yield self._rows_of(data), xid

    async def _call(self) -> ToolCall:
        cache, fetch = ReferenceCache(), self._runtime.results.get
        frame = {f"__frame_{name}": value for name, value in self._frame.model_dump(mode="json").items()}
        scope = self._execution.scope(cache, self._step).with_locals(frame)
        return ToolCall(
            execution_id=self._execution.id,
            step=self._step,
            task=Task(name="claim", kind=self._cursor.kind),
            config={"command": await render_async(self._sql, scope, fetch)},
            input=frame,
            auth=await render_async(self._auth, scope, fetch),
            scope=scope,
            folder=self._execution.folder,
        )

    def _rows_of(self, data: Any) -> list[Any]:
        rows = data.get("rows") if isinstance(data, dict) else None
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
