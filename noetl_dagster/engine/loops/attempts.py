"""A command and the attempts that a ``retry`` block adds, after errors or successes.

Each attempt is a command of its own in the log: a restart resumes with the attempt that was due, and a page that was
fetched is not fetched again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import StorageError, TemplateError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope
from noetl_dagster.events.queries import COMMAND_DUE, COMMAND_END, COMMAND_LOST, SEQUENCE_ENDED
from noetl_dagster.playbook.models import Collect, CollectStrategy, RetryRule, Task
from noetl_dagster.playbook.templates.rendering import render_async, undecided
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView, seen_error
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.storage import codec
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.values import admit, encode_json
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Visit
from noetl_dagster.worker.pipeline import overridden
from noetl_dagster.worker.program import (
    LONGEST_DELAY,
    Continuation,
    StepProgram,
    TaskProgram,
    delay_before,
    matches,
)
from noetl_dagster.worker.runner import Call

PART_BYTES = 1 << 20
"""Bytes of JSON of collected pages, from which on they are stored as one part."""

_CHANGING = frozenset({"_attempt", "attempt", "iter", "ctx", "vars"})
"""Names by which a task's own templates may make another request of the same ``next_call``."""

MISSING = object()

SHARD_RETRY = {"rule": "max_shard_retries"}
"""Why a failed shard is tried again if no rule asks for it."""

RESUMED = {"rule": "resumed"}
"""Why a command that had failed is tried again: its execution was resumed."""

LOST = {"rule": "lost"}
"""Why a command that had succeeded runs again: the bytes of its result are missing."""


@dataclass(slots=True)
class Attempts:
    """A command and the attempts that its task's ``retry`` block adds.

    Attributes:
        command: the latest attempt.
        spare: retries of a failed call when no rule applies to failures.
        failures: since the last success; bounds the retries of each call, on every page.
        successes: pages fetched; bounds pagination.
        reason: why the latest attempt follows a failure.
        requests: digests of the requests of pages, with the number of the page.
    """

    runtime: Runtime
    visit: Visit
    command: Command
    spare: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    failures: int = 0
    successes: int = 0
    reason: dict[str, Any] | None = None
    requests: dict[bytes, int] = field(default_factory=dict)
    pages: Pages = field(init=False)

    def __post_init__(self) -> None:
        self.pages = Pages(self.runtime.results)

    async def run(self, *, issued: bool = False, resumed: bool = False) -> Outcome:
        """Runs the command and its followers; returns the last outcome, or all pages together.

        Args:
            issued: the first attempt is in the log already.
            resumed: attempts may have ended before; those are taken from the log.
        """
        runtime, program = self.runtime, self.visit.program
        entries = (entry.rule for task in program.tasks for entry in task.continuations)
        on_error = next((rule for rule in entries if not rule.continues_success), None)
        spare = 0 if on_error is not None else self.spare
        patches: list[tuple[list[str], Any]] = []

        def is_final(outcome: Outcome) -> bool:
            return on_error is None or not on_error.allows(self.failures + 1)

        while True:
            place = (self.command.execution_id, self.command.command_id)
            record = await runtime.reads.fetchrow(COMMAND_END, *place) if resumed else None
            if (
                record is not None
                and self.visit.has_lost_results
                and await runtime.reads.fetchval(COMMAND_LOST, *place)
            ):
                self.command = replace(self.command, attempt=self.command.attempt + 1, follows=False)
                self.reason = LOST
                continue
            replayed = record is not None
            if record is not None:
                outcome = Outcome.of(record)
            else:
                if not issued:
                    await self._issue(resumed)
                due = self.command.not_before
                if due and (wait := due - time.time()) > 0:
                    await asyncio.sleep(wait)
                call = Call(self.visit, self.command, self.values, is_final)
                outcome = await runtime.runner_of(program).run(call)
            self.count += 1
            self.failures = self.failures + 1 if outcome.failed else 0
            self.successes += not outcome.failed
            patches.extend(outcome.patches)
            self.reason = None
            follower = await self._follower(outcome) if program.retries else None
            # a resumed execution tries once more
            if follower is None and outcome.failed and (replayed or self.failures <= spare):
                follower = replace(self.command, attempt=self.command.attempt + 1, follows=False)
                self.reason = RESUMED if replayed else SHARD_RETRY
            if follower is None:
                break
            self.command, issued = follower, False
        outcome.patches = patches
        if self.pages.is_used and not outcome.failed:
            outcome = await self._aggregated(outcome, replayed=replayed)
        if self.command.part:
            await runtime.buffer.post([runtime.commands.shard_ended(self.command, outcome)])
        return outcome

    async def _issue(self, resumed: bool) -> None:
        """Writes ``command.issued``. A command that an interrupted run had issued keeps its due time."""
        runtime, command = self.runtime, self.command
        page = self.successes + 1 if self.requests else None
        event = runtime.commands.issued(command, self.visit.program.kind, retry=self.reason, page=page)
        new = await runtime.buffer.append([event])
        if event.event_id not in new and resumed and command.not_before:
            due = await runtime.reads.fetchval(COMMAND_DUE, command.execution_id, command.command_id)
            self.command = replace(command, not_before=float(due or 0.0))

    async def _follower(self, outcome: Outcome) -> Command | None:
        """Returns the next attempt that a rule asks for, or None."""
        command, envelope = self.command, outcome.envelope
        cache, fetch = ReferenceCache(), self.runtime.results.get
        scope = await self.visit.command_scope(command, cache, fetch, self.values)
        view = ResultView(envelope, cache)
        names = _names(envelope, view, command.attempt) | {"_page": self.successes, "_rows": self.pages.rows}
        scope = scope.with_locals(names).with_fallbacks({command.step: view})
        made = self.failures if outcome.failed else self.successes
        asked = (envelope.get("error") or {}).get("retry_after")
        undefined: list[str] = []
        for task, number, continuation in _applicable(self.visit.program, outcome):
            rule = continuation.rule
            try:
                wanted = await matches(continuation.when, scope, fetch, undefined, failed=outcome.failed)
                if rule.collect is not None:
                    await self._collect(rule.collect, envelope, more=wanted)
                if wanted and rule.continues_success and not rule.allows(made):
                    raise _more_follow(rule, command)
                if self.pages.failure is not None:
                    return None
                if not (wanted and rule.allows(made)):
                    continue
                overrides = command.overrides
                if continuation.next_call is not None:
                    changes = admit(await render_async(continuation.next_call, scope, fetch), "next_call")
                    overrides = _merged(overrides, changes)
                    if changes and not (task.config.names | task.input.names) & _CHANGING:
                        self._note_request(task.task, overrides)
            except (ToolError, TemplateError) as error:
                self.pages.failure = self.pages.failure or error
                return None
            if outcome.failed:
                self.reason = {"task": task.name, "rule": number}
            follows, not_before = not outcome.failed, due(rule, made, asked)
            return replace(
                command, attempt=command.attempt + 1, follows=follows, not_before=not_before, overrides=overrides
            )
        if undefined and not outcome.failed:
            self.pages.failure = undecided(f"retry rule of step {command.step}", undefined)
        return None

    def _note_request(self, task: Task, overrides: dict[str, Any]) -> None:
        """Notes the request of the next page. A resumed execution notes those of its earlier pages again.

        Raises:
            ToolError: the sequence has made the same request before, so it would never end.
        """
        if not self.requests:
            self.requests[_digest_of_request(task, self.command.overrides)] = self.successes
        page = self.successes + 1
        earlier = self.requests.setdefault(_digest_of_request(task, overrides), page)
        if earlier != page:
            raise ToolError(
                f"retry in step {self.command.step}: the request of page {page} is the same as that of page {earlier} "
                f"({encode_json(overrides).decode():.200}), so the pages would never end; look at 'when' and "
                "'next_call'",
                kind="schema",
            )

    async def _collect(self, collect: Collect, envelope: Envelope, *, more: bool) -> None:
        """Adds a page: the parsed body of http, the data of other tools.

        If a step consumes the pages as they come, each is a chunk.
        """
        command, streams, body = self.command, self.runtime.streams, envelope.get("data")
        if "ref" in envelope:
            body = await self.runtime.results.get(envelope["ref"])
        if "http" in envelope and isinstance(body, Mapping) and "status_code" in body:
            body = body.get("data")
        is_chunk = command.index is None and streams.of(command.visit_key) is not None
        ref = await self.pages.add(collect, body, command, alone=is_chunk)
        if is_chunk and ref is not None:
            page: Envelope = {"status": OK, "ref": ref}
            await streams.publish_result(command, self.pages.count - 1, page, more=more)

    async def _aggregated(self, outcome: Outcome, *, replayed: bool) -> Outcome:
        """Returns all pages as one result, recorded once as ``retry_sequence_completed``."""
        runtime, command = self.runtime, self.command
        try:
            pages = await self.pages.envelope(command)
            envelope = await runtime.result_writer.seal(pages, command, None)
        except (ToolError, StorageError, TemplateError) as error:
            envelope = error_envelope(error)
        whole = replace(outcome, envelope=envelope)
        place = (command.execution_id, command.command_id)
        if not (replayed and await runtime.reads.fetchval(SEQUENCE_ENDED, *place)):
            await runtime.buffer.post([runtime.commands.sequence(command, whole, self.count)])
        return whole


def _digest_of_request(task: Task, overrides: dict[str, Any]) -> bytes:
    """Returns the digest of what pages of a task differ in."""
    config, arguments = overridden(task.config, task.input if isinstance(task.input, dict) else {}, overrides)
    parts = [config.get(name) for name in ("url", "params", "headers", "json")]
    return blake2b(encode_json(admit([*parts, arguments], "next_call")), digest_size=16).digest()


def _applicable(program: StepProgram, outcome: Outcome) -> Iterator[tuple[TaskProgram, int, Continuation]]:
    """Yields the retry rules that apply to an outcome, each with its task and its number there.

    A rule that pages or collects applies to successes. Any other applies to failures, and also to successes if its
    condition tests the output: that is how a playbook polls.
    """
    for task in program.tasks:
        for number, entry in enumerate(task.continuations):
            if not (entry.rule.continues_success if outcome.failed else entry.is_for_failures):
                yield task, number, entry


def _more_follow(rule: RetryRule, command: Command) -> ToolError:
    return ToolError(
        f"retry in step {command.step}: page {rule.most} is the last that max_attempts allows, and its 'when' "
        "says that another one follows; raise max_attempts",
        kind="schema",
    )


def due(rule: RetryRule, made: int, asked: float | None = None) -> float:
    """Returns the Unix time at which the next attempt is due, 0: at once. Pages wait only if their rule has a delay.

    The server may have ``asked`` to wait some seconds.
    """
    if rule.continues_success and "delay" not in rule.model_fields_set:
        return 0.0
    most = LONGEST_DELAY if rule.max_delay is None else rule.max_delay
    seconds = delay_before(rule.backoff, rule.delay, made, most=most)
    return time.time() + max(seconds if rule.max_delay is None else min(seconds, most), asked or 0.0)


def _names(envelope: Envelope, view: ResultView, attempt: int) -> dict[str, Any]:
    names: dict[str, Any] = dict.fromkeys(("output", "response", "result"), view)
    names |= {"_attempt": attempt, "attempt": attempt}
    if envelope["status"] != OK:
        names["error"] = seen_error(envelope["error"])
    if "http" in envelope:
        names["status_code"] = envelope["http"].get("status")
    return names


def _merged(before: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """Lays the next call's changes over those of the call before. A new address replaces its query, too."""
    merged = {key: value for key, value in before.items() if key != "params" or not following.get("url")}
    for key, value in following.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


class Pages:
    """Collects pages by their strategy. The first ``failure`` makes them no result.

    Appended pages may have any size. A merged mapping, and a page that replaces the one before, stay in memory, since
    their readers hold them in memory too.
    """

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._value: Any = None
        self._bytes = 0
        self._parts: list[ResultRef] = []
        self.count = self.rows = 0
        self.failure: ToolError | StorageError | TemplateError | None = None

    @property
    def is_used(self) -> bool:
        """Reports that a page was added, or could not be."""
        return self.count > 0 or self.failure is not None

    async def add(self, collect: Collect, body: Any, command: Command, *, alone: bool) -> ResultRef | None:
        """Adds the value at the path of a page, fetched by ``command``. ``alone``: returns it as a part of its own."""
        self.count += 1
        try:
            part = _value_at(body, collect.path)
            if part is MISSING:
                message = f"collect: page {self.count} has no {collect.path!r}"
                raise ToolError(f"{message}; name the path of what a page brings", kind="schema")
            if collect.strategy is CollectStrategy.REPLACE:
                self._value = part
            elif collect.strategy is CollectStrategy.MERGE:
                self._value = {} if self._value is None else self._value
                self._value.update(part if isinstance(part, Mapping) else {})
            else:
                table = codec.as_arrow_table(part)
                rows = part if table is None else admit(table.to_pylist(), "a page")
                rows = rows if isinstance(rows, list) else [rows]
                self._value = [] if self._value is None else self._value
                self._value.extend(rows)
                self.rows += len(rows)
                self._bytes += len(encode_json(rows))
                if self._bytes > PART_BYTES or alone:
                    return await self._flush(command)
            if alone:
                return await self._stored(part, command)
        except (ToolError, StorageError) as error:
            self.failure = error
        return None

    async def envelope(self, command: Command) -> Envelope:
        """Returns all pages as one result, or raises the error of a page. ``command`` is the last attempt."""
        if self.failure is not None:
            raise self.failure
        if not self._parts:
            return {"status": OK, "data": self._value}
        if self._value:
            await self._flush(command)
        place, name = command.visit_key[:2], _part_name(command)
        ref = await self._store.manifest(*place, name, self._parts, Strategy.CONCAT)
        return {"status": OK, "ref": ref}

    async def _flush(self, command: Command) -> ResultRef:
        rows, self._value, self._bytes = self._value, [], 0
        self._parts.append(await self._stored(rows, command))
        return self._parts[-1]

    async def _stored(self, value: Any, command: Command) -> ResultRef:
        name = f"{_part_name(command)}-{command.attempt}"
        return await self._store.put(value, execution_id=command.execution_id, step=command.step, name=name)


def _part_name(command: Command) -> str:
    return f"pages-{command.visit}" + ("" if command.index is None else f"-{command.index}")


def _value_at(body: Any, path: str | None) -> Any:
    """Returns the value at a path of the body or of its ``data``; ``MISSING`` if neither has it."""
    value = body
    for key in path.split(".") if path else ():
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    if value is MISSING and isinstance(body, Mapping) and isinstance(body.get("data"), Mapping):
        return _value_at(body["data"], path)
    return value
