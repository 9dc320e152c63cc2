"""Runs commands in this process: claim, pipeline, sink, and the event that ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from noetl_dagster.errors import ToolError
from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.envelopes import error_envelope, event_context
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import Sink
from noetl_dagster.playbook.templates.rendering import render_async
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage import codec
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.tools.base import Toolbox
from noetl_dagster.tools.rows.batches import StoredResult, batches_of, has_rows
from noetl_dagster.tools.rows.watermarks import greatest, greatest_of_batches, moved
from noetl_dagster.tools.sinks.parts import PartSinks
from noetl_dagster.tools.sinks.place import PartPlace, part_prefix
from noetl_dagster.tools.sinks.postgres import Complete, write_sink
from noetl_dagster.worker.chunks import ChunkStreams
from noetl_dagster.worker.command import Command, CommandEvents, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.pipeline import TASK_ERRORS, Pipeline, defect
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.running import ExternalCleanup, Heartbeats
from noetl_dagster.worker.spans import CommandSpan, step_span

logger = logging.getLogger(__name__)


def always_final(outcome: Outcome) -> bool:
    """Marks every outcome as final."""
    return True


@dataclass(slots=True)
class Call:
    """A command that is in the log, with the objects that its run needs.

    Attributes:
        values: the ``iter`` values shared with earlier attempts of the same iteration.
        is_final: false for a failed outcome that will be tried again; goes into the event.
    """

    execution: Execution
    program: StepProgram
    command: Command
    values: dict[str, Any] | None = None
    is_final: Callable[[Outcome], bool] = always_final


class Runner(Protocol):
    """Runs commands to their end: in this process, or in the pool through the dispatcher."""

    async def run(self, call: Call) -> Outcome:
        """Claims and runs an issued command; its end is in the log afterwards."""
        ...


class CommandRunner:
    """Runs one command at a time for each caller; callers bound how many at once."""

    def __init__(
        self,
        box: Toolbox,
        pipeline: Pipeline,
        buffer: EventBuffer,
        events: CommandEvents,
        heartbeats: Heartbeats,
        cleanup: ExternalCleanup,
        streams: ChunkStreams,
    ) -> None:
        self._box = box
        self._parts = PartSinks(box)
        self._pipeline = pipeline
        self._buffer = buffer
        self._events = events
        self._heartbeats = heartbeats
        self._cleanup = cleanup
        self._streams = streams
        box.progress = heartbeats.tell
        box.chunks = streams
        box.after, box.over = cleanup.keep, cleanup.is_over

    async def run(self, call: Call, *, claimed: bool = False) -> Outcome:
        """Claims and runs an issued command and hands its end to the event buffer.

        Args:
            claimed: the command was claimed before, for an op in another process that waits for its end.
        """
        command, span = call.command, None
        if call.execution.trace is not None:
            span = self.span(call.execution, command)
        names = {} if span is None else span.names
        with LogContext(
            execution_id=command.execution_id, step=command.step, command_id=command.command_id, **names
        ):
            outcome = await self.cleared(command, self._run(call, claimed, span))
        if span is not None:
            span.ended(outcome, self._events.worker_id)
        return outcome

    async def cleared(self, command: Command, work: Awaitable[Outcome]) -> Outcome:
        """Runs a command's work, and removes the leftovers of its tools once its end is in the log."""
        cleanup = self._cleanup
        try:
            outcome = await work
        except BaseException as error:
            if cleanup:
                await cleanup.interrupted(command, error)
            raise
        if cleanup:
            await cleanup.ended(command)
        return outcome

    def span(self, execution: Execution, command: Command) -> CommandSpan | None:
        """Opens the span of a command; None if no trace is recorded."""
        trace = execution.trace
        if trace is None:
            return None
        parent = step_span(trace, execution.state, command.step, command.visit)
        return CommandSpan(trace, parent, command, self._box.credentials.redact)

    async def _run(self, call: Call, claimed: bool, span: CommandSpan | None) -> Outcome:
        program, command = call.program, call.command
        if not claimed:
            await self._buffer.post([self._events.claimed(command)])
        cache = ReferenceCache()
        with self._heartbeats.beating(command), self._streams.running(command, program.telling_task):
            outcome = await self.outcome(call.execution, program, command, cache, call.values, span)
            if claimed and program.retries:
                outcome.values = call.values or {}  # the next attempt may run in any process
            if program.sink is not None and not outcome.failed:
                return await self._end_with_sink(call, program.sink, outcome, cache)
            if program.step.state is not None and not outcome.failed:
                outcome = await self._with_reached(call, outcome, cache)
        await self._buffer.post([self._ended(call, outcome)])
        return outcome

    def _ended(self, call: Call, outcome: Outcome) -> Event:
        """Makes the terminal event; that of a final failure includes the command's context."""
        final = call.is_final(outcome)
        event = self._events.ended(call.command, outcome, final=final)
        if outcome.failed and final:
            state = call.execution.state
            event.context = (event.context or {}) | event_context(
                execution_id=call.execution.id,
                catalog_id=call.command.catalog_id,
                command_id=call.command.command_id,
                workload=state.workload,
                vars=state.ctx,
                results={step: end.envelope for step, end in state.latest.items()},
            )
        return event

    async def outcome(
        self,
        execution: Execution,
        program: StepProgram,
        command: Command,
        cache: ReferenceCache,
        values: dict[str, Any] | None = None,
        span: CommandSpan | None = None,
    ) -> Outcome:
        """Runs the tasks of a command, without its events and sink; never raises for their failure."""
        try:
            scope = await execution.command_scope(program, command, cache, self._box.results.get, values)
        except TASK_ERRORS as error:
            return Outcome(error_envelope(error))
        loop = program.step.loop
        limit = loop.fanout.shard_ttl if command.shard and loop is not None else None
        work = self._pipeline.run(program, command, scope, cache, folder=execution.folder, span=span)
        if limit is None:
            return await work
        try:
            return await asyncio.wait_for(work, limit)
        except TimeoutError:
            late = ToolError(
                f"shard {command.index} of step {command.step} took longer than its shard_ttl of {limit:g} s",
                kind="timeout",
                retryable=True,
            )
            return Outcome(error_envelope(late), duration=limit)

    async def _end_with_sink(
        self, call: Call, sink: Sink, outcome: Outcome, cache: ReferenceCache
    ) -> Outcome:
        """Writes the sink and the completion: in one transaction if they share a database.

        Any other sink is staged first, and published when the completion is in the log.
        """
        command = call.command
        view = ResultView(outcome.envelope, cache)
        names = await self._result_scope(call, view, cache)
        identity = _identity(command)
        await self._buffer.flush()
        completed = False
        try:
            value = await self._result(outcome, view)
            outcome.reached = await self._reached(call, value, names)
            if sink.is_staged:
                outcome.sink = await self._parts.stage(
                    sink, value, names, name=_part_name(command), own=identity, folder=call.execution.folder
                )
            else:
                complete = self._completion(command, outcome)
                written = await write_sink(
                    self._box, sink, value, names, identity=identity, complete=complete
                )
                completed = written.completed
        except Exception as error:
            known = error
            if not isinstance(error, TASK_ERRORS):
                known = defect(error, f"sink {sink.tool}", command.step, self._box)
            failed = Outcome(error_envelope(known, sink.tool), tasks=outcome.tasks, duration=outcome.duration)
            await self._buffer.post([self._ended(call, failed)])
            return failed
        if not completed:
            ended = self._events.ended(command, outcome)
            new = await self._buffer.append([ended])
            if outcome.sink is not None and self._buffer.log.transactional and ended.event_id in new:
                await self._publish(outcome.sink)
        return outcome

    async def _result_scope(self, call: Call, view: ResultView, cache: ReferenceCache) -> Scope:
        """Returns the command's names with its result."""
        fetch = self._box.results.get
        scope = await call.execution.command_scope(call.program, call.command, cache, fetch, call.values)
        return scope.with_locals({"result": view, "output": view})

    async def _with_reached(self, call: Call, outcome: Outcome, cache: ReferenceCache) -> Outcome:
        """Adds the new watermark to the outcome of a command without a sink."""
        view = ResultView(outcome.envelope, cache)
        try:
            names = await self._result_scope(call, view, cache)
            outcome.reached = await self._reached(call, await self._result(outcome, view), names)
        except TASK_ERRORS as error:
            return Outcome(error_envelope(error), tasks=outcome.tasks, duration=outcome.duration)
        return outcome

    async def _reached(self, call: Call, value: Any, names: Scope) -> dict[str, Any]:
        """Returns the watermark part of the command's end. Results without rows leave the watermark unchanged."""
        program, command = call.program, call.command
        spec, kept = program.step.state, call.execution.state.watermarks.get((command.step, command.visit))
        if spec is None or kept is None:
            return {}
        if program.reached is None:
            reached = await greatest_of_batches(batches_of(value), spec.key, command.step)
        elif not await has_rows(value):
            return {}
        else:
            found = await render_async(program.reached, names, self._box.results.get)
            reached = greatest([found], command.step)
        if reached is None:
            return {}
        watermark = moved(kept, reached, command.step)
        said: dict[str, Any] = {"reached": reached}
        if watermark is not None and program.moves_with_command:
            said["watermark"] = watermark
        return said

    async def _publish(self, place: PartPlace) -> None:
        """Publishes a part whose completion is in the log; if that fails, it is published when the step ends."""
        try:
            await self._parts.publish([place])
        except ToolError as error:
            logger.warning("a part of a sink is published when its step ends: %s", error)

    def _completion(self, command: Command, outcome: Outcome) -> Complete | None:
        """Returns the function that writes the completion on the sink's connection, if events go to the log."""
        log = self._buffer.log
        if not log.transactional:
            return None

        async def complete(connection: Any) -> None:
            # the execution may have been cancelled after the claim of the command
            ended = self._events.ended(command, outcome)
            if not await log.append([ended], connection=connection, gated=True):
                raise ToolError(
                    f"command {command.command_id} was ended by another worker, to which its sink is left, "
                    "or with its execution",
                    kind="claim",
                )

        return complete

    async def _result(self, outcome: Outcome, view: ResultView) -> Any:
        """Returns the value of a result, or a reader of its rows when they are more than a chunk."""
        ref, results = outcome.envelope.get("ref"), self._box.results
        if ref is None:
            return view.plain()
        rows = _listed(ref) if isinstance(ref, ResultRef) else None
        if rows is None or (
            rows.kind is RefKind.OBJECT and rows.bytes_size <= self._box.settings.chunk_bytes
        ):
            return await results.get(ref)
        return StoredResult(lambda: results.batches(rows), lambda: results.get(ref))


def _listed(ref: ResultRef) -> ResultRef | None:
    """Returns the reference from which rows can be read in batches; None if only the whole value can be read."""
    if (around := ref.around) is not None:
        place = "data" if "status_code" in around.fields else "rows"
        return ref.rows_alone if place in around.at else None
    if ref.kind is RefKind.MANIFEST:
        return ref if strategy_of(ref) in (Strategy.CONCAT, Strategy.APPEND) else None
    is_list = ref.kind is RefKind.DATASET or ref.content_type in (codec.JSON_LINES, codec.PARQUET)
    return ref if is_list else None


def _part_name(command: Command) -> str:
    prefix = part_prefix(command.execution_id, command.step, command.visit)
    return (
        f"{prefix}{command.attempt}"
        if command.index is None
        else f"{prefix}{command.index}.{command.attempt}"
    )


def _identity(command: Command) -> dict[str, Any]:
    """Returns the columns that identify the iteration, for sinks that upsert."""
    identity: dict[str, Any] = {"execution_id": command.execution_id}
    if command.loop_id is not None:
        identity |= {"loop_id": command.loop_id, "iter_index": command.index}
    if command.shard:
        identity["shard_id"] = command.shard_id
    return identity
