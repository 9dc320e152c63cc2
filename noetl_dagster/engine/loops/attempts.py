"""Runs one command and the attempts that a ``retry`` block adds, after errors or successes.

Each attempt is a command of its own in the log: a restart resumes with the attempt that was due, and a page that was
fetched is not fetched again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from noetl_dagster.engine.loops.pages import Pages
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope, from_result
from noetl_dagster.events.queries import COMMAND_DUE, COMMAND_END, SEQUENCE_ENDED
from noetl_dagster.playbook.models import Collect, RetryRule
from noetl_dagster.playbook.templates.failures import seen_error
from noetl_dagster.playbook.templates.rendering import render_async
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.worker.chunks import stream_key
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.policy import delay_before, matches
from noetl_dagster.worker.program import Continuation, StepProgram
from noetl_dagster.worker.runner import Call


@dataclass(slots=True)
class _Sequence:
    """The attempts of one command so far.

    Attributes:
        failures: since the last success; bounds the retries of each call, on every page.
        successes: pages fetched; bounds pagination.
        pages: the results of successful attempts, once a rule collects.
    """

    values: dict[str, Any]
    pages: Pages
    attempts: int = 0
    failures: int = 0
    successes: int = 0
    patches: list[tuple[list[str], Any]] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        self.attempts += 1
        self.failures = self.failures + 1 if outcome.failed else 0
        self.successes += not outcome.failed
        self.patches.extend(outcome.patches)

    def made(self, outcome: Outcome) -> int:
        """Returns the number of attempts that count towards ``max_attempts`` of a rule for such an outcome."""
        return self.failures if outcome.failed else self.successes


class Attempts:
    """Runs a command and the attempts that its task's ``retry`` block adds."""

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
        spare: int = 0,
    ) -> Outcome:
        """Runs ``command`` and its followers; returns the last outcome, or all pages together.

        Args:
            issued: the first attempt is in the log already.
            resumed: attempts may have ended before; those are taken from the log.
            values: the ``iter`` values of the iteration.
            spare: retries of a failed call when no rule applies to failures.
        """
        if _on_error(program) is not None:
            spare = 0
        sequence = _Sequence({} if values is None else values, Pages(self._runtime.results))
        while True:
            outcome = await self._ended(command) if resumed else None
            replayed = outcome is not None
            if outcome is None:
                if not issued:
                    command = await self._issue(program, command, resumed=resumed)
                outcome = await self._run_when_due(execution, program, command, sequence)
            sequence.count(outcome)
            follower = None
            if program.retries:
                follower = await self._follower(execution, program, command, outcome, sequence)
            # a resumed execution tries once more
            if follower is None and outcome.failed and (replayed or sequence.failures <= spare):
                follower = replace(command, attempt=command.attempt + 1, follows=False)
            if follower is None:
                break
            command, issued = follower, False
        outcome.patches = sequence.patches
        if sequence.pages.is_used and not outcome.failed:
            outcome = await self._aggregated(command, outcome, sequence, replayed=replayed)
        if command.part:
            await self._runtime.buffer.post([self._runtime.commands.shard_ended(command, outcome)])
        return outcome

    async def _issue(self, program: StepProgram, command: Command, *, resumed: bool) -> Command:
        """Writes ``command.issued``. A command that an interrupted run had issued keeps its due time."""
        event = self._runtime.commands.issued(command, program.kind)
        new = await self._runtime.buffer.append([event])
        if event.event_id in new or not resumed or not command.not_before:
            return command
        due = await self._runtime.pool.fetchval(COMMAND_DUE, command.execution_id, command.command_id)
        return replace(command, not_before=float(due or 0.0))

    async def _run_when_due(
        self, execution: Execution, program: StepProgram, command: Command, sequence: _Sequence
    ) -> Outcome:
        wait = command.not_before - time.time()
        if command.not_before and wait > 0:
            await asyncio.sleep(wait)
        continuation = _on_error(program)

        def is_final(outcome: Outcome) -> bool:
            return continuation is None or not continuation.rule.allows(sequence.failures + 1)

        call = Call(execution, program, command, sequence.values, is_final)
        return await self._runtime.runner_of(program).run(call)

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
        sequence: _Sequence,
    ) -> Command | None:
        """Returns the next attempt that a rule asks for, or None."""
        cache = ReferenceCache()
        fetch = self._runtime.results.get
        scope = await execution.command_scope(program, command, cache, fetch, sequence.values)
        view = ResultView(outcome.envelope, cache)
        scope = scope.with_locals(_names(outcome.envelope, view, command.attempt))
        made = sequence.made(outcome)
        for continuation in _applicable(program, outcome):
            rule = continuation.rule
            wanted = await matches(continuation.when, scope, fetch)
            if rule.collect is not None:
                body = await self._body(outcome.envelope)
                await self._page(sequence, rule.collect, command, body, more=wanted)
            if wanted and rule.continues_success and not rule.allows(made):
                sequence.pages.fail(_more_follow(rule, command))
            if sequence.pages.failure is not None:
                return None
            if not (wanted and rule.allows(made)):
                continue
            follower = replace(
                command,
                attempt=command.attempt + 1,
                follows=not outcome.failed,
                not_before=_due(rule, made),
            )
            if continuation.next_call is None:
                return follower
            changes = await render_async(continuation.next_call, scope, fetch)
            return replace(follower, overrides=_merged(command.overrides, changes))
        return None

    async def _page(
        self, sequence: _Sequence, collect: Collect, command: Command, body: Any, *, more: bool
    ) -> None:
        """Adds a page to the sequence. If a step consumes the pages as they come, each is a chunk."""
        streams = self._runtime.streams
        is_chunk = command.index is None and streams.of(stream_key(command)) is not None
        ref = await sequence.pages.add(collect, body, command, alone=is_chunk)
        if is_chunk and ref is not None:
            number = sequence.pages.count - 1
            await streams.publish_result(command, number, {"status": OK, "ref": ref}, more=more)

    async def _body(self, envelope: Envelope) -> Any:
        """Returns the response body: the parsed body of http, the data of other tools."""
        data = envelope.get("data")
        if "ref" in envelope:
            data = await self._runtime.results.get(envelope["ref"])
        if "http" in envelope and isinstance(data, Mapping) and "status_code" in data:
            return data.get("data")
        return data

    async def _aggregated(
        self, command: Command, outcome: Outcome, sequence: _Sequence, *, replayed: bool
    ) -> Outcome:
        """Returns all pages as one result, recorded once as ``retry_sequence_completed``."""
        try:
            envelope = await self._runtime.result_writer.seal(
                await sequence.pages.envelope(command), command, None
            )
        except (ToolError, StorageError) as error:
            envelope = error_envelope(error)
        whole = replace(outcome, envelope=envelope)
        pool = self._runtime.pool
        if not (replayed and await pool.fetchval(SEQUENCE_ENDED, command.execution_id, command.command_id)):
            await self._runtime.buffer.post(
                [self._runtime.commands.sequence(command, whole, sequence.attempts)]
            )
        return whole


def _applicable(program: StepProgram, outcome: Outcome) -> Iterator[Continuation]:
    """Yields the retry rules that apply to an outcome.

    A rule that pages or collects applies to successes. Any other applies to failures, and also to successes if its
    condition tests the output: that is how a playbook polls.
    """
    for task in program.tasks:
        for entry in task.continuations:
            if entry.rule.continues_success:
                if not outcome.failed:
                    yield entry
            elif outcome.failed or not entry.is_for_failures:
                yield entry


def _more_follow(rule: RetryRule, command: Command) -> ToolError:
    return ToolError(
        f"retry in step {command.step}: page {rule.max_attempts} is the last that max_attempts allows, and its 'when' "
        "says that another one follows; raise max_attempts, or leave it out for any number of pages",
        kind="schema",
    )


def _due(rule: RetryRule, made: int) -> float:
    """Returns the Unix time at which the next attempt is due, 0: at once. Pages wait only if their rule has a delay."""
    if rule.continues_success and "delay" not in rule.model_fields_set:
        return 0.0
    seconds = delay_before(rule.backoff, rule.delay, made)
    return time.time() + (seconds if rule.max_delay is None else min(seconds, rule.max_delay))


def _names(envelope: Envelope, view: ResultView, attempt: int) -> dict[str, Any]:
    names: dict[str, Any] = {"output": view, "response": view, "result": view, "_attempt": attempt}
    names["attempt"] = attempt
    if envelope["status"] != OK:
        names["error"] = seen_error(envelope["error"])
    if "http" in envelope:
        names["status_code"] = envelope["http"].get("status")
    return names


def _on_error(program: StepProgram) -> Continuation | None:
    return next(
        (entry for task in program.tasks for entry in task.continuations if not entry.rule.continues_success),
        None,
    )


def _merged(before: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """Lays the next call's changes over those of the call before."""
    merged = dict(before)
    for key, value in following.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
