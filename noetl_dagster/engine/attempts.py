"""One command and, where a ``retry`` block asks for them, the commands that follow it.

Each attempt is a command of its own in the log: a restart goes on with the attempt that was due, and a
page that was fetched is not fetched again (seed "Distributed loop and retry", retry on error and success).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import TemplateError, UndefinedNameError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope, from_result
from noetl_dagster.events.queries import COMMAND_END
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import Backoff, Collect, CollectStrategy
from noetl_dagster.playbook.scope import Scope
from noetl_dagster.playbook.templates import holds_async, render_async
from noetl_dagster.playbook.views import ReferenceCache, ResultView
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.policy import delay_before
from noetl_dagster.worker.program import Continuation, StepProgram

MISSING = object()


@dataclass(slots=True)
class _Pages:
    """What successful attempts gave so far."""

    collect: Collect | None = None
    collected: Any = None
    attempts: int = 0

    def add(self, collect: Collect, body: Any) -> None:
        part = _part(body, collect.path)
        self.collect = collect
        if collect.strategy is CollectStrategy.REPLACE:
            self.collected = part
        elif collect.strategy is CollectStrategy.MERGE:
            self.collected = {**(self.collected or {}), **(part if isinstance(part, Mapping) else {})}
        else:
            self.collected = [*(self.collected or []), *(part if isinstance(part, list) else [part])]


class Attempts:
    """Runs a command and whatever its task's ``retry`` block makes follow."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run(
        self,
        execution: Execution,
        program: StepProgram,
        command: Command,
        *,
        issued: bool = False,
        resumed: bool = False,
        values: dict[str, Any] | None = None,
    ) -> Outcome:
        """Runs ``command`` and its followers; the outcome is that of the last, or all pages together.

        Args:
            issued: the first attempt is in the log already.
            resumed: attempts may have ended before; those are taken from the log.
            values: the ``iter`` values of the iteration.
        """
        pages = _Pages()
        values = {} if values is None else values
        patches: list[tuple[list[str], Any]] = []
        first = command.attempt
        while True:
            outcome = await self._ended(command) if resumed else None
            replayed = outcome is not None
            if outcome is None:
                if not issued:
                    await self._issue(program, command)
                outcome = await self._run_when_due(execution, program, command, values, first)
            patches.extend(outcome.patches)
            follower = None
            if program.retries:
                follower = await self._follower(
                    execution, program, command, outcome, values, pages, first, replayed
                )
            elif replayed and outcome.failed:
                follower = replace(command, attempt=command.attempt + 1)
            if follower is None:
                break
            command, issued = follower, False
        outcome.patches = patches
        if pages.collect is not None:
            outcome = await self._aggregated(execution, program, command, outcome, pages)
        return outcome

    async def _issue(self, program: StepProgram, command: Command) -> None:
        kind = program.tasks[0].task.kind if program.tasks else "noop"
        await self._runtime.buffer.append([self._runtime.commands.issued(command, kind)])

    async def _run_when_due(
        self,
        execution: Execution,
        program: StepProgram,
        command: Command,
        values: dict[str, Any],
        first: int,
    ) -> Outcome:
        wait = command.not_before - time.time()
        if command.not_before and wait > 0:
            await asyncio.sleep(wait)
        continuation = _on_error(program)

        def is_final(outcome: Outcome) -> bool:
            return continuation is None or command.attempt - first + 1 >= continuation.rule.max_attempts

        return await self._runtime.runner_of(program).run(
            execution, program, command, values=values, is_final=is_final
        )

    async def _ended(self, command: Command) -> Outcome | None:
        record = await self._runtime.pool.fetchrow(COMMAND_END, command.execution_id, command.command_id)
        if record is None:
            return None
        envelope = from_result(record["result"])
        context = record["context"] or {}
        patches = [(path, value) for path, value in context.get("patches", ())]
        return Outcome(envelope, patches, step_values=context.get("step", {}))

    async def _follower(
        self,
        execution: Execution,
        program: StepProgram,
        command: Command,
        outcome: Outcome,
        values: dict[str, Any],
        pages: _Pages,
        first: int,
        replayed: bool,
    ) -> Command | None:
        """The next attempt, or None when there is none to make."""
        cache = ReferenceCache()
        fetch = self._runtime.results.get
        scope = await execution.command_scope(program, command, cache, fetch, values)
        view = ResultView(outcome.envelope, cache)
        made = command.attempt - first + 1
        scope = scope.with_locals(_names(outcome.envelope, view, command.attempt))
        continuations = [entry for task in program.tasks for entry in task.continuations]
        pages.attempts = made
        for continuation in continuations:
            rule = continuation.rule
            if rule.continues_success is outcome.failed:
                continue
            wanted = await self._holds(continuation, scope)
            if rule.collect is not None:
                pages.add(rule.collect, await self._body(outcome.envelope))
            if not wanted or made >= rule.max_attempts:
                continue
            if outcome.failed:
                delay = delay_before(rule.backoff, rule.delay, made)
                return replace(command, attempt=command.attempt + 1, not_before=time.time() + delay)
            overrides = {}
            if continuation.next_call is not None:
                overrides = await render_async(continuation.next_call, scope, fetch)
            delay = rule.delay if rule.next_call is None and rule.backoff is not Backoff.NONE else 0.0
            due = time.time() + delay if delay else 0.0
            return replace(
                command,
                attempt=command.attempt + 1,
                overrides=_merged(command.overrides, overrides),
                not_before=due,
            )
        if replayed and outcome.failed:
            return replace(command, attempt=command.attempt + 1)
        return None

    async def _holds(self, continuation: Continuation, scope: Scope) -> bool:
        try:
            return await holds_async(continuation.when, scope, self._runtime.results.get)
        except UndefinedNameError:
            return False

    async def _body(self, envelope: Envelope) -> Any:
        """The response body: of http the parsed body, of other tools the data."""
        data = envelope.get("data")
        if "ref" in envelope:
            data = await self._runtime.results.get(envelope["ref"])
        if "http" in envelope and isinstance(data, Mapping) and "status_code" in data:
            return data.get("data")
        return data

    async def _aggregated(
        self,
        execution: Execution,
        program: StepProgram,
        command: Command,
        outcome: Outcome,
        pages: _Pages,
    ) -> Outcome:
        """All pages as one result, recorded as ``retry_sequence_completed``."""
        if outcome.failed:
            return outcome
        envelope: Envelope = {"status": OK, "data": pages.collected}
        try:
            envelope = await self._runtime.sealer.seal(envelope, command, None)
        except TemplateError as error:
            envelope = error_envelope(error)
        event = Event(
            execution_id=command.execution_id,
            event_id=self._runtime.ids.next(),
            event_type=EventType.RETRY_SEQUENCE_COMPLETED,
            node_name=command.step,
            status="COMPLETED",
            catalog_id=command.catalog_id,
            meta={**command.meta(), "total_attempts": pages.attempts},
        )
        await self._runtime.buffer.post([event])
        return replace(outcome, envelope=envelope)


def _names(envelope: Envelope, view: ResultView, attempt: int) -> dict[str, Any]:
    names: dict[str, Any] = {"output": view, "response": view, "result": view, "_attempt": attempt}
    if envelope["status"] != OK:
        names["error"] = envelope["error"]
    return names


def _on_error(program: StepProgram) -> Continuation | None:
    return next(
        (entry for task in program.tasks for entry in task.continuations if not entry.rule.continues_success),
        None,
    )


def _part(body: Any, path: str | None) -> Any:
    if not path:
        return body
    value = body
    for key in path.split("."):
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
        if value is MISSING:
            break
    if value is MISSING and isinstance(body, Mapping) and isinstance(body.get("data"), Mapping):
        return _part(body["data"], path)
    return None if value is MISSING else value


def _merged(before: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """The next call's changes on top of those of the call before."""
    merged = dict(before)
    for key, value in following.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
