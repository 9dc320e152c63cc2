"""One visit of a step, from its entry to the arcs that fire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.engine.loops.activation import fanin_status
from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.chunks import publish_whole
from noetl_dagster.engine.loops.cursor import CursorSource
from noetl_dagster.engine.loops.gather import LoopResult, merge_patches
from noetl_dagster.engine.loops.loop import CollectionSource, Loops, OpenSource
from noetl_dagster.engine.loops.stream import ChunkSource
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.checks import blocking_failure, evaluate, settle_sink
from noetl_dagster.engine.steps.entry import reads_of, settings_of
from noetl_dagster.engine.steps.routing import Routed, event_names, route
from noetl_dagster.engine.steps.visits import VisitDrivers
from noetl_dagster.engine.steps.watermarks import entered_watermark, moved_watermark
from noetl_dagster.errors import (
    AssetNotFoundError,
    NoetlError,
    TemplateError,
    ToolError,
)
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, error_envelope, to_result
from noetl_dagster.events.state import PASSED, CheckOutcome, StepEnd, assign
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.assets import key_text
from noetl_dagster.playbook.models import LOOP_DONE, STEP_DONE, STEP_FAILED, Loop, LoopMode
from noetl_dagster.playbook.templates.failures import seen_error
from noetl_dagster.playbook.templates.rendering import holds_async, render_async, with_references
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.worker.chunks import ChunkStream
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.pipeline import TASK_ERRORS
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.spans import step_ended, step_names

Patches = list[tuple[list[str], Any]]


@dataclass(frozen=True, slots=True)
class VisitEntry:
    """The entry into a visit: with its end if it needs no work, or else with the number of the driver."""

    turn: int = 1
    end: StepEnd | None = None


@dataclass(slots=True)
class _WorkOutcome:
    """The outcome of a step's work, before its end is written."""

    envelope: Envelope
    patches: Patches = field(default_factory=list)
    loop: LoopResult | None = None
    fanin: dict[str, Any] | None = None
    step_values: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.envelope["status"] != OK)

    @property
    def event_name(self) -> str:
        return STEP_FAILED if self.failed else LOOP_DONE if self.loop is not None else STEP_DONE


class Steps:
    """The step function: it executes the playbook language for every driver, Dagster ops or the walker."""

    def __init__(self, runtime: Runtime, turns: VisitDrivers) -> None:
        self._runtime = runtime
        self._turns = turns
        self._loops = Loops(runtime)
        self._attempts = Attempts(runtime)

    async def run(
        self, execution: Execution, step: str, visit: int = 1, *, entered: Callable[[], None] | None = None
    ) -> StepEnd:
        """Runs a visit of a step that is no fan-out; one that has ended is only read from the log.

        Args:
            entered: called when this process begins to drive the visit.

        Returns:
            The end of the visit; the caller handles ``unhandled`` failures.
        """
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return ended
        with LogContext(
            execution_id=execution.id, step=step, **step_names(execution.trace, execution.state, step, visit)
        ):
            return await self._run(execution, execution.program.step(step), visit, entered)

    @asynccontextmanager
    async def streaming(
        self, execution: Execution, step: str, takers: Sequence[str], visit: int = 1
    ) -> AsyncIterator[ChunkStream]:
        """Opens the stream of a visit's chunks, which other steps consume in this process until the block ends."""
        ahead = self._runtime.settings.chunks_ahead
        loops = ((taker, execution.program.step(taker).step.loop) for taker in takers)
        rooms = {taker: ahead + (1 if loop is None else loop.max_in_flight) for taker, loop in loops}
        place = (execution.id, step, visit)
        stream = await self._runtime.streams.open(place, rooms)
        try:
            yield stream
        finally:
            self._runtime.streams.close(place, stream)

    async def refresh(self, execution: Execution, step: str, stream: ChunkStream, visit: int = 1) -> None:
        """Adds the chunks in the log to a stream; another driver may have written them."""
        await self._runtime.streams.refresh((execution.id, step, visit), stream)

    async def _run(
        self, execution: Execution, program: StepProgram, visit: int, entered: Callable[[], None] | None
    ) -> StepEnd:
        async with self.entering(execution, program, visit) as entry:
            if entry.end is not None:
                return entry.end
            if entered is not None:
                entered()
            try:
                resumed = execution.state.epoch > 1 or entry.turn > 1
                program = execution.step(program.step.name, visit)
                ending = await self._work(execution, program, visit, resumed)
            except TASK_ERRORS as error:
                ending = _WorkOutcome(error_envelope(error))
            return await self._end(execution, program, visit, ending)

    @asynccontextmanager
    async def entering(
        self, execution: Execution, program: StepProgram, visit: int
    ) -> AsyncIterator[VisitEntry]:
        """Writes ``step.enter`` and evaluates the admission policy; drives the visit until the block ends.

        Yields:
            An entry with an end if the step is skipped, cannot be admitted, or was ended by another process.
        """
        step = program.step.name
        event = self._event(execution, step, visit, EventType.STEP_ENTER, "RUNNING")
        event.meta["resumed"] = execution.state.visits.get(step, 0) >= visit
        missing: NoetlError | None = None
        try:
            event.context = await self._kept(execution, program, visit, event)
        except (AssetNotFoundError, *TASK_ERRORS) as error:
            missing = error
        async with self._turns.turn(execution, event) as turn:
            if turn is None:
                yield VisitEntry(end=execution.state.ends[(step, visit)])
            elif missing is not None:
                execution.state.apply(event)
                yield VisitEntry(turn, await self.fail(execution, program, visit, missing))
            else:
                resumed = turn > 1 or event.meta["resumed"]
                end = await self._refusal(execution, program, visit, event)
                if end is None and resumed:
                    end = await self._recover_sink(execution, program, visit)
                yield VisitEntry(turn, end)

    async def _kept(
        self, execution: Execution, program: StepProgram, visit: int, entered: Event
    ) -> dict[str, Any] | None:
        """Determines, once for all drivers of a visit, its reads, watermark and settings."""
        reads = await reads_of(self._runtime, execution, program, visit)
        if reads:
            entered.context = {"reads": reads}
        watermark = await entered_watermark(self._runtime, execution, program, visit, entered)
        if watermark is not None:
            entered.context = {**(entered.context or {}), "watermark": watermark}
        settings = await settings_of(self._runtime, execution, program, visit, entered)
        if settings:
            return {**(entered.context or {}), "settings": settings}
        return entered.context

    async def _refusal(
        self, execution: Execution, program: StepProgram, visit: int, entered: Event
    ) -> StepEnd | None:
        """Returns the end of a visit that the admission policy refuses, or None."""
        if program.admit is None:
            execution.state.apply(entered)
            return None
        try:
            scope = execution.scope(ReferenceCache(), program.step.name, entered)
            admitted = await holds_async(program.admit, scope, self._runtime.results.get)
        except TASK_ERRORS as error:
            execution.state.apply(entered)
            return await self.fail(execution, program, visit, error)
        execution.state.apply(entered)
        return None if admitted else await self.skip(execution, program, visit)

    async def _recover_sink(self, execution: Execution, program: StepProgram, visit: int) -> StepEnd | None:
        """Publishes parts that an earlier run left, before newer parts; returns the end of a visit if that fails."""
        try:
            await settle_sink(self._runtime, execution, program, visit, is_over=False)
        except TASK_ERRORS as error:
            return await self.fail(execution, program, visit, error)
        return None

    async def skip(self, execution: Execution, program: StepProgram, visit: int) -> StepEnd:
        """Ends a visit that the admission policy refused: nothing runs and no arc fires."""
        step = program.step.name
        skipped = self._event(execution, step, visit, EventType.STEP_SKIPPED, "SKIPPED")
        event = self._event(execution, step, visit, EventType.STEP_EXIT, "SKIPPED")
        event.result = {"status": "skipped"}
        return await self._settle(execution, [skipped, event])

    async def end_loop(
        self, execution: Execution, program: StepProgram, visit: int, result: LoopResult
    ) -> StepEnd:
        """Ends a fan-out whose shards have all ended."""
        fanin = {
            "status": fanin_status(result.done, result.failed),
            "done": result.done,
            "failed": result.failed,
            "total": result.envelope["total"],
            "refs": result.envelope.get("ref"),
        }
        try:
            ending = await self._loop_ending(execution, program, result)
        except TASK_ERRORS as error:
            ending = _WorkOutcome(error_envelope(error), loop=result)
        ending.fanin = fanin
        return await self._end(execution, program, visit, ending)

    async def fail(
        self, execution: Execution, program: StepProgram, visit: int, error: BaseException
    ) -> StepEnd:
        """Ends a visit with a failure that happened outside of any command."""
        return await self._end(execution, program, visit, _WorkOutcome(error_envelope(error)))

    async def _work(
        self, execution: Execution, program: StepProgram, visit: int, resumed: bool
    ) -> _WorkOutcome:
        if program.step.loop is not None:
            result = await self._loops.run(_source_of(program.loop), execution, program, visit)
            return await self._loop_ending(execution, program, result)
        if not program.tasks:
            return _WorkOutcome({"status": OK, "data": None})
        command = execution.command(program.step.name, visit)
        outcome = await self._attempts.run(execution, program, command, resumed=resumed)
        await publish_whole(self._runtime, command, outcome)
        return _WorkOutcome(outcome.envelope, outcome.patches, step_values=outcome.step_values)

    async def _loop_ending(
        self, execution: Execution, program: StepProgram, result: LoopResult
    ) -> _WorkOutcome:
        loop = program.loop
        envelope = result.envelope
        allow_partial = loop.may_fail_in_part or loop.fanout.allow_partial
        if envelope["failed"] and not allow_partial:
            errors = "; ".join(result.errors)
            message = f"{envelope['failed']} of {envelope['total']} iterations failed: {errors}"
            failure = ToolError(message, kind="loop", code="ITERATIONS_FAILED")
            envelope = envelope | error_envelope(failure)
        else:
            envelope = envelope | {"status": OK}
        patches = await self._merge(execution, program, result)
        return _WorkOutcome(envelope, patches, loop=result)

    async def _merge(self, execution: Execution, program: StepProgram, result: LoopResult) -> Patches:
        """Returns the writes of iterations to ctx: the last of each path if sequential, else merged with a warning."""
        loop = program.loop
        if loop.is_sequential:
            return list({tuple(path): (list(path), value) for _, path, value in result.patches}.values())
        written, conflicts = merge_patches(result.patches, execution.state.ctx)
        if conflicts:
            names = ", ".join(conflicts)
            message = f"step {program.step.name}: parallel iterations set ctx.{names} to different values"
            if program.step.spec.strict_ctx or loop.strict_ctx:
                raise ToolError(
                    f"{message}; collect them from the loop's results, or set spec.strict_ctx: false",
                    kind="context",
                )
            await self._warn(execution, program.step.name, f"{message}; the last item's value stands")
        return [(list(path), value) for path, value in written.items()]

    async def _end(
        self, execution: Execution, program: StepProgram, visit: int, ending: _WorkOutcome
    ) -> StepEnd:
        """Applies ``output`` and ``set``, routes, and writes ``step.exit`` with the arcs that fired."""
        step = program.step.name
        watermark: dict[str, Any] | None = None
        try:
            await settle_sink(self._runtime, execution, program, visit)
            watermark = await self._moved(execution, program, visit, ending)
        except TASK_ERRORS as error:
            ending.envelope = error_envelope(error)
        cache = ReferenceCache()
        scope = _with_reached(execution.scope(cache, step), watermark).with_step_values(ending.step_values)
        for path, value in ending.patches:
            assign(scope.ctx, path, value)
        outcomes: list[CheckOutcome] = []
        try:
            if not ending.failed:
                await self._shape(program, ending, scope, cache)
                outcomes = await self._checked(program, visit, ending, scope, cache)
        except TASK_ERRORS as error:
            ending.envelope = error_envelope(error)
        routed = await self._route(program, visit, ending, scope, cache)
        stuck = bool(routed.undefined) and not routed.fired
        if stuck and not ending.failed:
            message = f"no arc of step {step} could be decided: {'; '.join(routed.undefined)}"
            ending.envelope = error_envelope(TemplateError(message))
        unhandled = ending.failed and not routed.fired
        checks = [self._check_event(execution, outcome) for outcome in outcomes]
        event = self._event(
            execution, step, visit, EventType.STEP_EXIT, "FAILED" if ending.failed else "COMPLETED"
        )
        event.meta["fired"] = routed.fired
        if watermark is not None and not ending.failed:
            event.meta["watermark"] = watermark
        if program.step.is_asset:
            event.meta["asset"] = key_text(execution.playbook.asset_key(step))
            if execution.state.partition is not None:
                event.meta["partition"] = execution.state.partition["key"]
        if unhandled:
            event.meta["unhandled"] = True
        if routed.undefined:
            event.meta["undefined"] = routed.undefined
        patches = [*ending.patches, *routed.patches]
        if patches:
            event.context = {"patches": patches}
        event.result = to_result(ending.envelope)
        event.error = ending.envelope["error"]["message"] if ending.failed else None
        return await self._settle(execution, [*checks, event])

    async def _moved(
        self, execution: Execution, program: StepProgram, visit: int, ending: _WorkOutcome
    ) -> dict[str, Any] | None:
        """Returns the step's new watermark. It stays unchanged if anything was not loaded."""
        if program.step.state is None or ending.failed:
            return None
        failed = 0 if ending.loop is None else ending.loop.envelope["failed"]
        if failed:
            message = f"step {program.step.name}: its watermark stays, since {failed} iterations failed"
            await self._warn(execution, program.step.name, message)
            return None
        return await moved_watermark(self._runtime, execution, program, visit)

    async def _checked(
        self, program: StepProgram, visit: int, ending: _WorkOutcome, scope: Scope, cache: ReferenceCache
    ) -> list[CheckOutcome]:
        """Evaluates the step's checks; a blocking one that does not pass fails the step."""
        if not program.checks:
            return []
        named = scope.with_locals(self._names(program, visit, ending, cache))
        outcomes = await evaluate(self._runtime, program, visit, ending.envelope, named)
        failure = blocking_failure(outcomes)
        if failure is not None:
            ending.envelope = error_envelope(failure)
        return outcomes

    def _check_event(self, execution: Execution, outcome: CheckOutcome) -> Event:
        status = PASSED if outcome.passed else "FAILED"
        event = self._event(execution, outcome.step, outcome.visit, EventType.CHECK_EVALUATED, status)
        event.meta |= {"check": outcome.name, "severity": outcome.severity, "blocking": outcome.blocking}
        event.error = outcome.why or None
        event.context = {"facts": outcome.facts} if outcome.facts else None
        return event

    async def _route(
        self, program: StepProgram, visit: int, ending: _WorkOutcome, scope: Scope, cache: ReferenceCache
    ) -> Routed:
        """Returns the arcs that fire. If an arc's ``set`` cannot be rendered, the step fails and is routed again."""
        for _ in range(2):
            named = scope.with_locals(self._names(program, visit, ending, cache))
            try:
                return await route(program, named, ending.event_name, self._runtime.results.get)
            except TASK_ERRORS as error:
                ending.envelope = error_envelope(error)
        return Routed()

    async def _settle(self, execution: Execution, events: Sequence[Event]) -> StepEnd:
        """Appends ``step.exit``, the last of ``events``. The first end in the log counts."""
        exit_ = events[-1]
        step, visit = exit_.node_name or "", int(exit_.meta["visit"])
        if exit_.event_id in await self._runtime.buffer.append(events):
            if execution.trace is not None:
                redact = self._runtime.box.credentials.redact
                step_ended(execution.trace, execution.playbook, execution.state, exit_, redact)
            for event in events:
                execution.state.apply(event)
        else:
            await self._turns.settle(execution, step, visit)
        return execution.state.ends[(step, visit)]

    async def _shape(
        self, program: StepProgram, ending: _WorkOutcome, scope: Scope, cache: ReferenceCache
    ) -> None:
        fetch = self._runtime.results.get
        view = ResultView(ending.envelope, cache)
        names = {"output": view, "result": view, program.step.name: view, **_loop_names(ending)}
        named = scope.with_locals(names)
        if program.output is not None:
            data = await render_async(program.output, named, fetch)
            shaped = {"status": OK, "data": data}
            command = Command(scope.execution_id, program.step.name)
            ending.envelope = await self._runtime.result_writer.seal(shaped, command, None)
        if program.set:
            for patch in await with_references(lambda: program.set.patches(named), fetch):
                if patch.scope == "ctx":
                    patch.apply(scope.ctx)
                    ending.patches.append((list(patch.path), patch.value))
                else:
                    patch.apply(scope.step_values)

    def _names(
        self, program: StepProgram, visit: int, ending: _WorkOutcome, cache: ReferenceCache
    ) -> dict[str, Any]:
        """Returns the names of the arcs' templates."""
        view = ResultView(ending.envelope, cache)
        step = program.step.name
        payload = {"visit": visit, "result": view, "status": ending.envelope["status"]}
        names: dict[str, Any] = {
            "output": view,
            "result": view,
            step: view,
            "event": event_names(ending.event_name, step, payload),
            **_loop_names(ending),
        }
        if ending.envelope["status"] == ERROR:
            names["error"] = seen_error(ending.envelope.get("error"))
        return names

    async def _warn(self, execution: Execution, step: str, message: str) -> None:
        event = self._event(execution, step, 1, EventType.WARNING, "WARNING")
        event.error = message
        await self._runtime.buffer.post([event])
        execution.state.apply(event)

    def _event(self, execution: Execution, step: str, visit: int, type_: EventType, status: str) -> Event:
        meta = {"visit": visit, "epoch": execution.state.epoch}
        return self._runtime.event(execution.state, type_, step, "step", status, meta)


def _with_reached(scope: Scope, watermark: dict[str, Any] | None) -> Scope:
    """Adds ``state.reached``, the new value of the watermark; null if it did not move."""
    if scope.state is None:
        return scope
    return scope.with_state({**scope.state, "reached": None if watermark is None else watermark["value"]})


def _source_of(loop: Loop) -> OpenSource:
    if loop.mode is LoopMode.STREAM:
        return ChunkSource.open
    return CollectionSource.open if loop.cursor is None else CursorSource.open


def _loop_names(ending: _WorkOutcome) -> dict[str, Any]:
    names: dict[str, Any] = {}
    if ending.loop is not None:
        names["loop"] = {key: ending.loop.envelope[key] for key in ("total", "done", "failed")}
    if ending.fanin is not None:
        names["fanin"] = ending.fanin
    return names
