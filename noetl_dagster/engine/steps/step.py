"""One visit of a step, from its entry to the arcs that fire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.cursor import CursorSource
from noetl_dagster.engine.loops.gather import LoopResult, merge_patches
from noetl_dagster.engine.loops.loop import CollectionSource, OpenSource, run_loop
from noetl_dagster.engine.loops.stream import ChunkSource
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.checks import evaluate, publish_parts
from noetl_dagster.engine.steps.entry import VisitDrivers, reads_of, settings_of
from noetl_dagster.engine.steps.watermarks import WatermarkClaims, entered_watermark, lost_race, moved_watermark
from noetl_dagster.errors import AssetNotFoundError, NoetlError, RefusedEventError, TemplateError, ToolError
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, error_envelope, to_result
from noetl_dagster.events.state import PASSED, CheckOutcome, StepEnd, assign
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.assets import key_text
from noetl_dagster.playbook.models import (
    ARC_EVENTS,
    LOOP_DONE,
    STEP_DONE,
    STEP_FAILED,
    Arc,
    LoopMode,
    RoutingMode,
)
from noetl_dagster.playbook.templates.rendering import Fetch, render_async, undecided, with_references
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView, seen_error
from noetl_dagster.process.logs import LogContext
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.storage.codec import admitted
from noetl_dagster.values import legible
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution, Visit
from noetl_dagster.worker.pipeline import TASK_ERRORS, defect
from noetl_dagster.worker.spans import step_ended, step_names

Patches = list[tuple[list[str], Any]]


@dataclass(frozen=True, slots=True)
class VisitEntry:
    """The entry into a visit: with its end if it needs no work, or else with the number of the driver."""

    turn: int = 1
    end: StepEnd | None = None


@dataclass(slots=True)
class _Ending:
    """A visit whose work is done, before its end is written."""

    visit: Visit
    envelope: Envelope
    patches: Patches = field(default_factory=list)
    loop: LoopResult | None = None
    fanin: dict[str, Any] | None = None
    step_values: dict[str, Any] = field(default_factory=dict)
    cache: ReferenceCache = field(default_factory=ReferenceCache)

    @property
    def failed(self) -> bool:
        return bool(self.envelope["status"] != OK)

    def fail(self, error: BaseException) -> None:
        self.envelope = error_envelope(error)

    @property
    def event_name(self) -> str:
        return STEP_FAILED if self.failed else LOOP_DONE if self.loop is not None else STEP_DONE

    def names(self) -> dict[str, Any]:
        """Returns the names of the result in templates."""
        view = ResultView(self.envelope, self.cache)
        names: dict[str, Any] = {"output": view, "result": view, self.visit.step: view}
        if self.loop is not None:
            names["loop"] = self.loop.counts
        if self.fanin is not None:
            names["fanin"] = self.fanin
        return names

    def arc_names(self) -> dict[str, Any]:
        """Returns the names of the templates of arcs and checks."""
        names, status = self.names(), self.envelope["status"]
        payload = {"visit": self.visit.number, "result": names["result"], "status": status}
        names["event"] = {"name": EventName(self.event_name), "step": self.visit.step, "payload": payload}
        if status == ERROR:
            names["error"] = seen_error(self.envelope.get("error"))
        return names


@dataclass(slots=True)
class _Routed:
    """Outcome of routing: targets in arc order, the ctx patches of their ``set``, and undefined conditions."""

    fired: list[str] = field(default_factory=list)
    patches: Patches = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)


class Steps:
    """The step function: it executes the playbook language for every driver, Dagster ops or the walker."""

    def __init__(self, runtime: Runtime, drivers: VisitDrivers) -> None:
        self.runtime = runtime
        self._drivers = drivers
        self._claims = WatermarkClaims(runtime, drivers.liveness)

    async def run(
        self, execution: Execution, step: str, visit: int = 1, *, entered: Callable[[], None] | None = None
    ) -> StepEnd:
        """Runs a visit of a step that is no fan-out and returns its end; the caller handles ``unhandled`` failures.

        A visit that has ended is only read from the log. ``entered`` is called when this process begins to drive it.
        """
        async with self.entering(execution, step, visit) as entry:
            if entry.end is not None:
                return entry.end
            if entered is not None:
                entered()
            this = execution.visit(step, visit)
            try:
                ending = await self._work(this, resumed=execution.state.epoch > 1 or entry.turn > 1)
            except TASK_ERRORS as error:
                ending = _Ending(this, error_envelope(error))
            except Exception as error:
                ending = _Ending(this, error_envelope(defect(error, "the work", step)))
            return await self._end(ending)

    @asynccontextmanager
    async def entering(self, execution: Execution, step: str, number: int = 1) -> AsyncIterator[VisitEntry]:
        """Writes ``step.enter`` and evaluates the admission policy; drives the visit until the block ends.

        The entry has an end if the visit has ended, is skipped, or cannot be admitted.
        """
        visit, state = Visit(execution, execution.program.step(step), number), execution.state
        if visit.end is not None:
            yield VisitEntry(end=visit.end)
            return
        names = step_names(execution.trace, state, step, number)
        with LogContext(execution_id=execution.id, step=step, **names):
            event = self._event(visit, EventType.STEP_ENTER, "RUNNING")
            event.meta["resumed"] = state.visits.get(step, 0) >= number
            missing = await self._determine(visit, event)
            async with self._drivers.turn(visit, event) as turn:
                if turn is None:
                    yield VisitEntry(end=state.ends[(step, number)])
                    return
                state.apply(event)
                resumed = turn > 1 or event.meta["resumed"]
                yield VisitEntry(turn, await self._refusal(visit, missing, resumed=resumed))

    async def _determine(self, visit: Visit, entered: Event) -> NoetlError | None:
        """Adds reads, watermark and settings to ``step.enter``, once for all drivers; returns the error of one."""
        entered.context = context = {}  # each may use those before it
        try:
            if reads := await reads_of(self.runtime, visit):
                context["reads"] = reads
            if watermark := await entered_watermark(self.runtime, self._claims, visit, entered):
                context["watermark"] = watermark
            if settings := await settings_of(self.runtime, visit, entered):
                context["settings"] = settings
        except (AssetNotFoundError, *TASK_ERRORS) as error:
            return error
        finally:
            entered.context = context or None
        return None

    async def _refusal(self, visit: Visit, missing: NoetlError | None, *, resumed: bool) -> StepEnd | None:
        """Returns the end of a visit that does no work, or None."""
        admit = visit.program.admit
        try:
            if missing is not None:
                raise missing
            if admit is not None:
                scope = visit.scope(ReferenceCache())
                if not await with_references(self.runtime.results.get, admit.holds, scope):
                    return await self.skip(visit)
            if resumed:  # parts that an earlier run left are published before newer parts
                await publish_parts(self.runtime, visit, is_over=False)
        except (AssetNotFoundError, *TASK_ERRORS) as error:
            return await self.fail(visit, error)
        return None

    async def skip(self, visit: Visit) -> StepEnd:
        """Ends a visit that the admission policy refused: nothing runs and no arc fires."""
        skipped = self._event(visit, EventType.STEP_SKIPPED, "SKIPPED")
        event = self._event(visit, EventType.STEP_EXIT, "SKIPPED")
        event.result = {"status": "skipped"}
        return await self._append_end(visit, [skipped, event])

    async def end_loop(self, visit: Visit, result: LoopResult) -> StepEnd:
        """Ends a fan-out whose shards have all ended."""
        try:
            ending = await self._loop_ending(visit, result)
        except TASK_ERRORS as error:
            ending = _Ending(visit, error_envelope(error), loop=result)
        refs = result.envelope.get("ref")
        ending.fanin = {"status": result.fanin_status, **result.counts, "refs": refs}
        return await self._end(ending)

    async def fail(self, visit: Visit, error: BaseException) -> StepEnd:
        """Ends a visit with a failure that happened outside of any command."""
        return await self._end(_Ending(visit, error_envelope(error)))

    async def _work(self, visit: Visit, *, resumed: bool) -> _Ending:
        program, streams = visit.program, self.runtime.streams
        if program.step.loop is not None:
            open_source: OpenSource = ChunkSource.open
            if program.loop.mode is not LoopMode.STREAM:
                open_source = CollectionSource.open if program.loop.cursor is None else CursorSource.open
            return await self._loop_ending(visit, await run_loop(self.runtime, open_source, visit))
        if not program.tasks:
            return _Ending(visit, {"status": OK, "data": None})
        command = visit.command()
        outcome = await Attempts(self.runtime, visit, command).run(resumed=resumed)
        stream = streams.of(visit.key)
        if stream is not None and not outcome.failed and not stream.published:
            # its tool has published no chunks, so the whole result is one
            await streams.publish_result(command, 0, outcome.envelope, more=False)
        return _Ending(visit, outcome.envelope, outcome.patches, step_values=outcome.step_values)

    async def _loop_ending(self, visit: Visit, result: LoopResult) -> _Ending:
        loop, envelope = visit.program.loop, result.envelope
        allow_partial = loop.may_fail_in_part or loop.fanout.allow_partial
        if envelope["failed"] and not allow_partial:
            errors = "; ".join(result.errors)
            message = f"{envelope['failed']} of {envelope['total']} iterations failed: {errors}"
            failure = ToolError(message, kind="loop", code="ITERATIONS_FAILED")
            envelope = envelope | error_envelope(failure)
        else:
            envelope = envelope | {"status": OK}
        return _Ending(visit, envelope, await self._merge(visit, result), loop=result)

    async def _merge(self, visit: Visit, result: LoopResult) -> Patches:
        """Returns the writes of iterations to ctx: the last of each path if sequential, else merged with a warning."""
        program, loop = visit.program, visit.program.loop
        if loop.is_sequential:
            return list({tuple(path): (list(path), value) for _, path, value in result.patches}.values())
        written, conflicts = merge_patches(result.patches, visit.execution.state.ctx)
        if conflicts:
            names = ", ".join(conflicts)
            message = f"step {visit.step}: parallel iterations set ctx.{names} to different values"
            if program.step.spec.strict_ctx or loop.strict_ctx:
                raise ToolError(
                    f"{message}; collect them from the loop's results, or set spec.strict_ctx: false",
                    kind="context",
                )
            await self._warn(visit, f"{message}; the last item's value stands")
        return [(list(path), value) for path, value in written.items()]

    async def _end(self, ending: _Ending) -> StepEnd:
        """Ends a visit. If its end cannot be computed or written, the step fails with that error, and no arc fires."""
        visit = ending.visit
        try:
            return await self._append_end(visit, await self._end_events(ending))
        except RefusedEventError as error:
            failure: NoetlError = error
        except Exception as error:
            failure = defect(error, "the end", visit.step)
        await self._know_secrets(visit)
        ending.fail(failure)
        event = self._event(visit, EventType.STEP_EXIT, "FAILED")
        event.meta |= {"fired": [], "unhandled": True}
        event.result, event.error = to_result(ending.envelope), ending.envelope["error"]["message"]
        return await self._append_end(visit, [event])

    async def _end_events(self, ending: _Ending) -> list[Event]:
        """Applies ``output`` and ``set``, routes, and makes the events of the end: checks, and ``step.exit`` last."""
        visit, step, execution = ending.visit, ending.visit.program.step, ending.visit.execution
        watermark: dict[str, Any] | None = None
        try:
            await publish_parts(self.runtime, visit)
            watermark = await self._moved(ending)
        except TASK_ERRORS as error:
            ending.fail(error)
        scope = visit.scope(ending.cache).with_step_values(ending.step_values)
        if scope.state is not None:
            reached = None if watermark is None else watermark["value"]  # null if it did not move
            scope = scope.with_state({**scope.state, "reached": reached})
        for path, value in ending.patches:
            assign(scope.ctx, path, value)
        outcomes: list[CheckOutcome] = []
        try:
            if not ending.failed:
                await self._shape(ending, scope)
            if exposed := ending.envelope.get("secrets"):
                await self._know_secrets(visit)
                await self._warn(visit, f"step {step.name} stores a secret in {', '.join(exposed)}")
            if not ending.failed:
                outcomes = await self._checked(ending, scope)
        except TASK_ERRORS as error:
            await self._know_secrets(visit)
            ending.fail(error)
        routed = await self._route(ending, scope)
        if routed.undefined and not routed.fired and not ending.failed:
            ending.fail(undecided(f"arc of step {step.name}", routed.undefined))
        checks = [self._check_event(visit, outcome) for outcome in outcomes]
        event = self._event(visit, EventType.STEP_EXIT, "FAILED" if ending.failed else "COMPLETED")
        event.meta["fired"] = routed.fired
        if watermark is not None and not ending.failed:
            event.meta["watermark"] = watermark
        if step.is_asset:
            event.meta["asset"] = key_text(execution.playbook.asset_key(step.name))
            if execution.state.partition is not None:
                event.meta["partition"] = execution.state.partition["key"]
        if ending.failed and not routed.fired:
            event.meta["unhandled"] = True
        if routed.undefined:
            event.meta["undefined"] = routed.undefined
        patches = [*ending.patches, *routed.patches]
        event.context = {"patches": patches} if patches else None
        event.result = to_result(ending.envelope)
        event.error = ending.envelope["error"]["message"] if ending.failed else None
        return [*checks, event]

    async def _moved(self, ending: _Ending) -> dict[str, Any] | None:
        """Returns the step's new watermark. It stays unchanged if anything was not loaded."""
        visit = ending.visit
        if visit.program.step.state is None or ending.failed:
            return None
        failed = 0 if ending.loop is None else ending.loop.envelope["failed"]
        if failed:
            await self._warn(visit, f"step {visit.step}: its watermark stays, since {failed} iterations failed")
            return None
        watermark = await moved_watermark(self.runtime, visit)
        if watermark is None or "pending" in watermark:  # it moves when the execution completes
            return watermark
        if warning := await lost_race(self.runtime, visit, watermark):
            await self._warn(visit, warning)
        return watermark

    async def _checked(self, ending: _Ending, scope: Scope) -> list[CheckOutcome]:
        """Evaluates the step's checks; a blocking one that does not pass fails the step."""
        if not ending.visit.program.checks:
            return []
        named = scope.with_locals(ending.arc_names())
        outcomes = await evaluate(self.runtime, ending.visit, ending.envelope, named)
        failed = [one for one in outcomes if one.blocking and not one.passed]
        if failed:
            await self._know_secrets(ending.visit)
            failures = "; ".join(f"{one.name}: {one.why}" for one in failed)
            ending.fail(ToolError(f"the result did not pass {failures}", kind="check", code="CHECK_FAILED"))
        return outcomes

    def _check_event(self, visit: Visit, outcome: CheckOutcome) -> Event:
        event = self._event(visit, EventType.CHECK_EVALUATED, PASSED if outcome.passed else "FAILED")
        event.meta |= {"check": outcome.name, "severity": outcome.severity, "blocking": outcome.blocking}
        event.error = outcome.why or None
        event.context = {"facts": legible(SECRETS.redacted(outcome.facts))} if outcome.facts else None
        return event

    async def _route(self, ending: _Ending, scope: Scope) -> _Routed:
        """Returns the arcs that fire. If an arc's ``set`` cannot be rendered, the step fails and is routed again."""
        for _ in range(2):
            named = scope.with_locals(ending.arc_names())
            try:
                routed = await _fire(ending, named, self.runtime.results.get)
            except TASK_ERRORS as error:
                await self._know_secrets(ending.visit)
                ending.fail(error)
                continue
            if routed.undefined:
                await self._know_secrets(ending.visit)
                routed.undefined = SECRETS.redacted(routed.undefined)
            return routed
        return _Routed()

    async def _know_secrets(self, visit: Visit) -> None:
        """Lets this process know the secrets of a step whose commands other processes may have run.

        Called before a text is made of the step's result, if it may contain one.
        """
        keychain, fetch = visit.execution.keychain, self.runtime.results.get
        scope = visit.scope(ReferenceCache())
        if keychain is not None:
            with suppress(*TASK_ERRORS):
                scope = scope.with_keychain(await keychain(scope, fetch))
        for task in visit.program.tasks:
            with suppress(*TASK_ERRORS):
                await self.runtime.tool_context.credentials.know(await render_async(task.auth, scope, fetch))

    async def _append_end(self, visit: Visit, events: Sequence[Event]) -> StepEnd:
        """Appends ``step.exit``, the last of ``events``. The first end in the log counts."""
        execution = visit.execution
        if events[-1].event_id in await self.runtime.buffer.append(events):
            if execution.trace is not None:
                step_ended(execution.trace, execution.playbook, execution.state, events[-1])
            for event in events:
                execution.state.apply(event)
        else:
            await self._drivers.apply_end(visit)
        return execution.state.ends[(visit.step, visit.number)]

    async def _shape(self, ending: _Ending, scope: Scope) -> None:
        """Applies the step's ``output`` and ``set``."""
        program, fetch = ending.visit.program, self.runtime.results.get
        named = scope.with_locals(ending.names())
        if program.output is not None:
            shaped = {"status": OK, "data": admitted(await render_async(program.output, named, fetch), "output")}
            command = Command(scope.execution_id, program.step.name)
            ending.envelope = await self.runtime.result_writer.seal(shaped, command, None)
        if program.set:
            for patch in await with_references(fetch, program.set.patches, named):
                if patch.scope == "ctx":
                    patch.apply(scope.ctx)
                    ending.patches.append((list(patch.path), patch.value))
                else:
                    patch.apply(scope.step_values)

    async def _warn(self, visit: Visit, message: str) -> None:
        event = self._event(visit, EventType.WARNING, "WARNING")
        event.error = message
        await self.runtime.buffer.post([event])
        visit.execution.state.apply(event)

    def _event(self, visit: Visit, type_: EventType, status: str) -> Event:
        state = visit.execution.state
        meta = {"visit": visit.number, "epoch": state.epoch}
        return self.runtime.event(state, type_, visit.step, "step", status, meta)


async def _fire(ending: _Ending, scope: Scope, fetch: Fetch) -> _Routed:
    """Evaluates the arcs of a step that ended.

    After a failure only an arc with a ``when`` that is true, or one that listens to the failure, may fire.
    An arc whose ``when`` cannot be evaluated, mostly because of an undefined name, does not match and is reported.
    """
    program, routed = ending.visit.program, _Routed()
    for arc, (when, block) in zip(program.step.routing.arcs, program.arcs, strict=True):
        if not _may_fire(arc, ending.event_name):
            continue
        try:
            if not await with_references(fetch, when.holds, scope):
                continue
        except TemplateError as error:
            if when.is_strict and not ending.failed:
                raise
            routed.undefined.append(f"arc to {arc.step}: {error}")
            continue
        routed.fired.append(arc.step)
        patches = await with_references(fetch, block.patches, scope) if block else []
        for patch in patches:
            if patch.scope == "ctx":
                patch.apply(scope.ctx)
                routed.patches.append((list(patch.path), patch.value))
        if program.step.routing.mode is RoutingMode.EXCLUSIVE:
            break
    return routed


def _may_fire(arc: Arc, event_name: str) -> bool:
    if arc.on is not None:
        return event_name in ARC_EVENTS.get(arc.on, frozenset({arc.on}))
    return event_name != STEP_FAILED or arc.when is not None


class EventName(str):
    """The name of an event, equal to each of its spellings: ``step.done`` is ``call.done`` as well."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in ARC_EVENTS.get(other, (other,))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return str.__str__(self)

    __hash__ = str.__hash__
