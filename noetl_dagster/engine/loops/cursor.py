"""Cursor loops: each slot claims rows by SQL, processes them, and claims again until there are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, TypeVar

import asyncpg

from noetl_dagster.engine.loops.collection import Collection
from noetl_dagster.engine.loops.frames import (
    OWN_TRANSACTION,
    RELEASED,
    Frames,
    cursor_call,
    is_unfinished,
    release_frames,
)
from noetl_dagster.engine.loops.gather import IterationEnd
from noetl_dagster.engine.loops.loop import Iterate, IterationChunks, IterationSource, run_side_by_side
from noetl_dagster.engine.loops.loop_run import LoopRun, begin_loop, issue_events
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionCancelledError, ToolError
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.events.queries import LOOP_NEXT_INDEX
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import FrameProcess
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.running import prepare_statements, run_statements
from noetl_dagster.values import admit, encode_json
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Visit

T = TypeVar("T")

LATE_CLAIM_SECONDS = 10.0
"""A loop that is stopped waits this long for its claim; otherwise no loop would process the claimed rows."""


class CursorSource(IterationSource):
    """Iterations over rows that are claimed while the loop runs. The claims themselves record progress."""

    def __init__(self, loop_run: LoopRun, earlier_stop: int) -> None:
        super().__init__(loop_run, earlier_stop)
        self._next_index = earlier_stop
        self._frame = loop_run.program.loop.frame

    @classmethod
    async def open(cls, runtime: Runtime, visit: Visit) -> CursorSource:
        """Opens a new loop run, after the release of rows that earlier ones had claimed."""
        execution, cursor = visit.execution, visit.program.loop.cursor
        starts = execution.state.loops.get((visit.step, visit.number), [])
        if starts:
            await release_frames(runtime, execution.id, [entry.loop_id for entry in starts])
        loop_run = await begin_loop(runtime, visit, items=Collection(), resumes=False)
        first_index = await runtime.reads.fetchval(LOOP_NEXT_INDEX, execution.id, loop_run.loop_ids)
        assert cursor is not None
        return (cls if cursor.release is None else _ReleasingSource)(loop_run, first_index)

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Runs until every slot's claim returned no rows."""

        async def slot() -> None:
            while not self._stopped and (commands := await _finished_even_if_cancelled(self._take())):
                await self._run_frame(iterate, commands)

        await run_side_by_side(slot, self.loop_run.program.loop.max_in_flight)

    async def _run_frame(self, iterate: Iterate, commands: list[Command]) -> None:
        waiting = iter(commands)
        outcomes: list[Outcome] = []

        async def work() -> None:
            for command in waiting:
                outcome = await iterate(command, False)
                outcomes.append(outcome)

        await run_side_by_side(work, min(self._frame.row_concurrency, len(commands)))
        await self._frame_ended(commands, outcomes)

    def counts(self, end: IterationEnd) -> bool:
        """Excludes failures of earlier loop runs, and rows that another process released: these are claimed again."""
        return not end.failed or (end.index >= self.earlier_stop and not _is_released(end.envelope))

    async def _take(self) -> list[Command]:
        """Claims rows and returns their issued commands; none when there is nothing left."""
        runtime, call = self._runtime, await self._call()
        async with asyncio.timeout(self._frame.max_seconds):
            result = await tool_for(call.task.kind).run(call, runtime.tool_context)
        commands = self._commands(self._rows_of(result.data))
        events = self._issue_events(commands)
        try:
            await runtime.buffer.append(events)
        except ExecutionCancelledError:  # the claim had committed, so the log records the end of its rows
            item_events = [event for event in events if event.event_type == EventType.LOOP_ITEM]
            ends = [runtime.commands.cancelled(command, "its row had been claimed") for command in commands]
            await runtime.buffer.append([*item_events, *ends])
            raise
        return commands

    async def _frame_ended(self, commands: list[Command], outcomes: list[Outcome]) -> None:
        """Runs when all commands of a claim have ended."""

    def _commands(self, rows: list[Any]) -> list[Command]:
        items = rows if self._frame.process is FrameProcess.ROW else [rows] if rows else []
        first, attempt = self._next_index, len(self.loop_run.loop_ids)
        self._next_index += len(items)
        return [self.loop_run.iteration(index, item, attempt) for index, item in enumerate(items, first)]

    def _issue_events(self, commands: list[Command]) -> list[Event]:
        issued = (issue_events(self.loop_run, command) for command in commands)
        return list(chain.from_iterable(issued))

    async def _call(self) -> ToolCall:
        """Makes the call that claims. Its SQL may use its bounds: ``:__frame_max_rows``, or as a template."""
        cursor = self.loop_run.program.loop.cursor
        assert cursor is not None
        bounds = {f"__frame_{name}": value for name, value in self._frame.model_dump(mode="json").items()}
        scope = self.loop_run.scope(ReferenceCache()).with_locals(bounds)
        return await cursor_call(self._runtime, self.loop_run, "claim", cursor.claim, bounds, scope, scope)

    def _rows_of(self, data: Any) -> list[Any]:
        rows, step = data.get("rows") if isinstance(data, dict) else None, self.loop_run.step
        if rows is None:
            raise ToolError(
                f"step {step}: loop.cursor.claim returned no rows at all; end it with a SELECT or a RETURNING clause",
                kind="loop",
            )
        rows = admit(rows, f"step {step}: loop.cursor.claim")
        most = self._frame.max_bytes
        if most is not None and len(encode_json(rows)) > most:
            raise ToolError(
                f"step {step}: one claim returned more than frame.max_bytes ({most}); "
                "claim fewer rows with LIMIT {{ __frame_max_rows }}",
                kind="loop",
            )
        return list(rows)


class _ReleasingSource(CursorSource):
    """A cursor that releases rows: the log's database records a claim before the claim commits."""

    def __init__(self, loop_run: LoopRun, earlier_stop: int) -> None:
        super().__init__(loop_run, earlier_stop)
        self._frames = Frames(loop_run)
        self._lost_rows = False

    async def run(self, iterate: Iterate, chunks: IterationChunks | None) -> None:
        """Keeps the leases meanwhile, and releases the remaining rows at the end.

        Rows that another process began to release are claimed again. A cancelled loop leaves its rows to others.
        """
        async with self._frames.beating():
            try:
                await super().run(iterate, chunks)
                while self._lost_rows and not self._stopped:
                    self._lost_rows = False
                    await self._release()
                    await super().run(iterate, chunks)
            except Exception:
                await self._release()
                raise
            await self._release()

    async def _take(self) -> list[Command]:
        async with contextlib.AsyncExitStack() as claim:
            try:
                rows, xid = await claim.enter_async_context(self._uncommitted())
            except asyncpg.InvalidCachedStatementError:  # another session changed a table; nothing was done
                rows, xid = await claim.enter_async_context(self._uncommitted())
            commands = self._commands(rows)
            if commands:
                await self._frames.keep(rows, commands[0].index or 0, xid, self._issue_events(commands))
        return commands

    @asynccontextmanager
    async def _uncommitted(self) -> AsyncIterator[tuple[list[Any], int]]:
        """Claims in a transaction that commits when the block ends; yields the rows and the transaction's number."""
        call, context = await self._call(), self._runtime.tool_context
        statements = await prepare_statements(call, context)
        with postgres_errors(call):
            pool = await open_pool(call, context)
            async with pool.acquire() as connection, connection.transaction():
                async with asyncio.timeout(self._frame.max_seconds):
                    xid = await connection.fetchval(OWN_TRANSACTION)
                    data = await run_statements(connection, statements)
                yield self._rows_of(data), xid

    async def _frame_ended(self, commands: list[Command], outcomes: list[Outcome]) -> None:
        """Forgets a frame, unless some of its rows are to be released.

        Failed rows are released when the loop ends, so that this loop does not claim them again.
        """
        failures = [outcome.envelope for outcome in outcomes if outcome.failed]
        self._lost_rows |= any(_is_released(envelope) for envelope in failures)
        if self.loop_run.program.loop.may_fail_in_part:
            failures = [envelope for envelope in failures if is_unfinished(envelope)]
        if not failures:
            await self._frames.forget(commands[0].index or 0)

    async def _release(self) -> None:
        await self._runtime.buffer.flush(self.loop_run.execution.id)
        await release_frames(self._runtime, self.loop_run.execution.id, self.loop_run.loop_ids)


def _is_released(envelope: Envelope) -> bool:
    """Reports a command that another process ended when it released the command's rows."""
    return bool(envelope["error"].get("code") == RELEASED)


async def _finished_even_if_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that should not stop half done: after a cancellation it still ends before this stops."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=LATE_CLAIM_SECONDS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # its outcome is not needed any more
            await task
        raise
