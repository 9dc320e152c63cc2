"""Runs commands in this process: claim, pipeline, sink, and the event that ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from noetl_dagster.errors import ToolError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.envelopes import error_envelope, event_context
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.queries import WATERMARK_CLAIMANT, WATERMARK_LOCK_SHARED
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import Sink
from noetl_dagster.playbook.templates.rendering import render_async
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.process.logs import LogContext
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.batches import batches_of, has_rows, value_or_rows
from noetl_dagster.tools.rows.watermarks import greatest, greatest_of_batches, moved
from noetl_dagster.tools.sinks.parts import PartSinks
from noetl_dagster.tools.sinks.place import part_prefix
from noetl_dagster.tools.sinks.postgres import Complete, CompletingEvents, write_sink
from noetl_dagster.worker.chunks import ChunkStreams
from noetl_dagster.worker.command import Command, CommandEvents, Outcome
from noetl_dagster.worker.execution import Visit
from noetl_dagster.worker.pipeline import TASK_ERRORS, Pipeline, defect
from noetl_dagster.worker.results import ResultWriter
from noetl_dagster.worker.running import ExternalCleanup, Heartbeats
from noetl_dagster.worker.spans import CommandSpan, step_span

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Call:
    """A command that is in the log, with the objects that its run needs.

    Attributes:
        values: the ``iter`` values shared with earlier attempts of the same iteration.
        is_final: false for a failed outcome that will be tried again; goes into the event.
    """

    visit: Visit
    command: Command
    values: dict[str, Any] | None = None
    is_final: Callable[[Outcome], bool] = lambda outcome: True


class CommandExecutor(Protocol):
    """Runs commands to their end: in this process, or in the pool through the dispatcher."""

    async def run(self, call: Call) -> Outcome:
        """Claims and runs an issued command; its end is in the log afterwards."""
        ...


@dataclass(slots=True)
class _Claim:
    """The claim of a command, which waits a few milliseconds for its end: both may be written in one transaction."""

    buffer: EventBuffer
    event: Event
    writing: asyncio.Future[set[int]]

    @classmethod
    def begin(cls, buffer: EventBuffer, event: Event) -> _Claim:
        """Adds a claim to the buffer."""
        return cls(buffer, event, buffer.begin([event], urgent=False))

    async def taken(self) -> list[Event]:
        """Returns the claim for the caller to write, or nothing when it is in the log."""
        if self.buffer.withdraw(self.writing):
            return [self.event]
        await self.written()
        return []

    async def written(self) -> None:
        """Returns when the claim is in the log. One that was taken is written now, if it is not there."""
        if self.writing.cancelled():
            await self.buffer.append([self.event])
        else:
            self.buffer.hurry()
            await self.writing


@dataclass(slots=True)
class _Completion(CompletingEvents):
    """The end of a command, with its claim if that is not in the log yet."""

    log: EventLog
    command: Command
    ended: Event
    claim: _Claim | None

    async def events(self) -> list[Event]:
        """Returns the events, the end last."""
        return [*([] if self.claim is None else await self.claim.taken()), self.ended]

    def check(self, new: Set[int]) -> None:
        """Raises ``ToolError`` if the end is not new. The execution may have been cancelled after the claim."""
        if self.ended.event_id not in new:
            raise ToolError(
                f"command {self.command.command_id} was ended by another worker, to which its sink is left, "
                "or with its execution",
                kind="claim",
            )

    async def __call__(self, connection: Any) -> None:
        """Writes the events in the transaction of a connection."""
        self.check(await self.log.append(await self.events(), connection=connection, gated=True))


@dataclass(frozen=True, slots=True)
class CommandRunner:
    """Runs one command at a time for each caller; callers bound how many at once."""

    tool_context: ToolContext
    writer: ResultWriter
    buffer: EventBuffer
    events: CommandEvents
    heartbeats: Heartbeats
    cleanup: ExternalCleanup
    streams: ChunkStreams

    async def run(self, call: Call, *, claimed: bool = False) -> Outcome:
        """Claims an issued command, unless it is ``claimed``, runs it, and hands its end to the event buffer."""
        return await self.traced(call, lambda span: self._run(call, claimed, span))

    async def traced(self, call: Call, work: Callable[[CommandSpan | None], Awaitable[Outcome]]) -> Outcome:
        """Runs a command's work with its log fields and span; removes its leftovers once its end is in the log."""
        execution, command = call.visit.execution, call.command
        span, cleanup = None, self.cleanup
        if (trace := execution.trace) is not None:
            parent = step_span(trace, execution.state, command.step, command.visit)
            span = CommandSpan(trace, parent, command)
        names = {} if span is None else span.names
        with LogContext(execution_id=command.execution_id, step=command.step, command_id=command.command_id, **names):
            try:
                outcome = await work(span)
            except BaseException as error:
                if cleanup:
                    await cleanup.interrupted(command, error)
                raise
            if cleanup:
                await cleanup.ended(command)
        if span is not None:
            span.ended(outcome, self.events.worker_id)
        return outcome

    async def _run(self, call: Call, claimed: bool, span: CommandSpan | None) -> Outcome:
        program, command, sink = call.visit.program, call.command, call.visit.program.sink
        claim = None
        if not claimed and sink is not None and not sink.is_staged:
            claim = _Claim.begin(self.buffer, self.events.claimed(command))
        elif not claimed:
            await self.buffer.post([self.events.claimed(command)])
        cache = ReferenceCache()
        with self.heartbeats.beating(command), self.streams.running(command, program.telling_task):
            outcome = await self.outcome(call, cache, span)
            if claimed and program.retries:
                outcome.values = call.values or {}  # the next attempt may run in any process
            if sink is not None and not outcome.failed:
                return await self._end_with_sink(call, sink, outcome, cache, claim)
            if program.step.state is not None and not outcome.failed:
                outcome = await self._with_reached(call, outcome, cache)
        if claim is not None:
            await claim.written()
        await self.buffer.post([self._ended(call, outcome)])
        return outcome

    def _ended(self, call: Call, outcome: Outcome) -> Event:
        """Makes the terminal event; that of a final failure includes the command's context."""
        final = call.is_final(outcome)
        event = self.events.ended(call.command, outcome, final=final)
        if outcome.failed and final:
            state = call.visit.execution.state
            event.context = (event.context or {}) | event_context(
                execution_id=state.execution_id,
                catalog_id=call.command.catalog_id,
                command_id=call.command.command_id,
                workload=state.workload,
                vars=state.ctx,
                results={step: end.envelope for step, end in state.latest.items()},
            )
        return event

    async def outcome(self, call: Call, cache: ReferenceCache, span: CommandSpan | None = None) -> Outcome:
        """Runs the tasks of a command, without its events and sink; never raises for their failure."""
        visit, command = call.visit, call.command
        try:
            scope = await self._scope(call, cache)
        except TASK_ERRORS as error:
            return Outcome(error_envelope(error))
        loop = visit.program.step.loop
        limit = loop.fanout.shard_ttl if command.shard and loop is not None else None
        run = Pipeline(self.tool_context, self.writer, visit, command, scope, cache, span).run()
        if limit is None:
            return await run
        try:
            return await asyncio.wait_for(run, limit)
        except TimeoutError:
            late = ToolError(
                f"shard {command.index} of step {command.step} took longer than its shard_ttl of {limit:g} s",
                kind="timeout",
                retryable=True,
            )
            return Outcome(error_envelope(late), duration=limit)

    async def _end_with_sink(
        self, call: Call, sink: Sink, outcome: Outcome, cache: ReferenceCache, claim: _Claim | None
    ) -> Outcome:
        """Writes the sink and the completion: in one transaction if they share a database.

        Any other sink is staged first, and published when the completion is in the log. ``claim``: the command's
        claim, if it may not be in the log yet.
        """
        command, view = call.command, ResultView(outcome.envelope, cache)
        names = (await self._scope(call, cache)).with_locals({"result": view, "output": view})
        meta, identity = command.meta(), {"execution_id": command.execution_id}
        identity |= {name: meta[name] for name in ("loop_id", "iter_index", "shard_id") if name in meta}
        if claim is None:
            await self.buffer.flush(command.execution_id)
        completed = False
        try:
            value = await self._result(outcome, view)
            outcome.reached = await self._reached(call, value, names)
            if sink.is_staged:
                prefix = part_prefix(command.execution_id, command.step, command.visit)
                index = "" if command.index is None else f"{command.index}."
                name = f"{prefix}{index}{command.attempt}"
                outcome.sink = await PartSinks(self.tool_context).stage(
                    sink, value, names, name=name, own=identity, folder=call.visit.execution.folder
                )
            else:
                complete = self._completion(call, outcome, claim)
                completed = await write_sink(
                    self.tool_context, sink, value, names, identity=identity, complete=complete
                )
        except Exception as error:
            task_error = error
            if not isinstance(error, TASK_ERRORS):
                task_error = defect(error, f"sink {sink.tool}", command.step)
            failed = Outcome(error_envelope(task_error, sink.tool), tasks=outcome.tasks, duration=outcome.duration)
            if claim is not None:
                await claim.written()
            await self.buffer.post([self._ended(call, failed)])
            return failed
        if not completed:
            if claim is not None:
                await claim.written()
            ended = self.events.ended(command, outcome)
            new = await self.buffer.append([ended])
            if outcome.sink is not None and self.buffer.log.transactional and ended.event_id in new:
                try:
                    await PartSinks(self.tool_context).publish([outcome.sink])
                except ToolError as error:
                    logger.warning("a part of a sink is published when its step ends: %s", error)
        return outcome

    async def _scope(self, call: Call, cache: ReferenceCache) -> Scope:
        return await call.visit.command_scope(call.command, cache, self.tool_context.results.get, call.values)

    async def _with_reached(self, call: Call, outcome: Outcome, cache: ReferenceCache) -> Outcome:
        """Adds the new watermark to the outcome of a command without a sink."""
        view = ResultView(outcome.envelope, cache)
        try:
            names = (await self._scope(call, cache)).with_locals({"result": view, "output": view})
            outcome.reached = await self._reached(call, await self._result(outcome, view), names)
        except TASK_ERRORS as error:
            return Outcome(error_envelope(error), tasks=outcome.tasks, duration=outcome.duration)
        return outcome

    async def _reached(self, call: Call, value: Any, names: Scope) -> dict[str, Any]:
        """Returns the watermark part of the command's end. Results without rows leave the watermark unchanged."""
        visit, program, step = call.visit, call.visit.program, call.visit.step
        spec, entered = program.step.state, visit.execution.state.watermarks.get((step, visit.number))
        reached = None
        if spec is None or entered is None:
            return {}
        if program.reached is None:
            reached = await greatest_of_batches(batches_of(value), spec.key, step)
        elif await has_rows(value):
            reached = greatest([await render_async(program.reached, names, self.tool_context.results.get)], step)
        if reached is None:
            return {}
        watermark = moved(entered, reached, step)
        moves = watermark is not None and program.moves_with_command
        return {"reached": reached, "watermark": watermark} if moves else {"reached": reached}

    def _completion(self, call: Call, outcome: Outcome, claim: _Claim | None) -> Complete | None:
        """Returns the function that writes the completion on the sink's connection, if events go to the log."""
        log, command = self.buffer.log, call.command
        if not isinstance(log, EventLog):
            return None
        ended = self.events.ended(command, outcome)
        completion = _Completion(log, command, ended, claim)
        entered = call.visit.execution.state.watermarks.get((command.step, command.visit))
        if entered is None or not entered.get("claimed"):
            return completion

        async def complete(connection: Any) -> None:
            await _check_claim(connection, command, entered)
            await completion(connection)

        return complete

    async def _result(self, outcome: Outcome, view: ResultView) -> Any:
        """Returns the value of a result, or a reader of its rows when they are more than a chunk."""
        ref, context = outcome.envelope.get("ref"), self.tool_context
        return view.plain() if ref is None else await value_or_rows(ref, context.results, context.settings.chunk_bytes)


async def _check_claim(connection: Any, command: Command, watermark: Mapping[str, Any]) -> None:
    """Raises ``ToolError`` if another execution has claimed the watermark; none can until the transaction ends."""
    place = [watermark[field] for field in ("playbook", "name", "partition")]
    await connection.execute(WATERMARK_LOCK_SHARED, *place)
    claimant = await connection.fetchval(WATERMARK_CLAIMANT, *place)
    if claimant != command.execution_id:
        raise ToolError(
            f"step {command.step}: execution {claimant} has claimed the watermark {watermark['name']!r} while this one "
            "was out of reach; nothing is written. Resume this execution: it waits for the other one",
            kind="claim",
            code="WATERMARK_LOST",
        )
