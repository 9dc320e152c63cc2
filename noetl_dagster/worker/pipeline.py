"""Runs the tasks of a step once, under their policies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.errors import CredentialError, NoetlError, StorageError, TemplateError, ToolError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, as_json, error_envelope
from noetl_dagster.playbook.models import Directive, PolicyAction
from noetl_dagster.playbook.rules import DEFAULT, ELSE, RuleName
from noetl_dagster.playbook.templates.rendering import render_async, render_input, with_references
from noetl_dagster.playbook.templates.scope import CompiledSet, Scope
from noetl_dagster.playbook.templates.views import DataView, ReferenceCache, ResultView, seen_error
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.storage.codec import admitted
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.values import RefusedValueError, legible
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Visit
from noetl_dagster.worker.program import CompiledRule, TaskProgram, delay_before, parse_literal
from noetl_dagster.worker.results import MOST_FIELDS, ResultWriter, check_input, check_result, exposed_in
from noetl_dagster.worker.spans import CommandSpan

JUMP_LIMIT = 10_000
"""Jumps of one run of a pipeline, at most."""

TASK_ERRORS = (ToolError, TemplateError, CredentialError, StorageError)
"""Expected failures of a task: they name the cause and the place."""

PLATFORM_ERRORS = (NoetlError, *DATABASE_AWAY, MemoryError, BrokenExecutor)
"""Errors that are not a task's: the log cannot be reached, or the execution was cancelled, for example."""

REASON_CHARACTERS = 200
"""Length of an error's message in a decision; the command's own error has more of it."""

_ENDING = ("cannot schedule new futures", "can't start new thread", "Session is closed")
"""First words of the errors of a process that is ending, or out of resources."""

logger = logging.getLogger(__name__)

_UNLIMITED = nullcontext()


@dataclass(slots=True)
class Pipeline:
    """One run of a step's tasks, one after another, each under its policy.

    Attributes:
        scope: names of the step, its input and iteration included.
        cache: results fetched so far; dropped by the caller with the command.
        span: the command's span, which records the calls; None if no trace is recorded.
    """

    tool_context: ToolContext
    writer: ResultWriter
    visit: Visit
    command: Command
    scope: Scope
    cache: ReferenceCache
    span: CommandSpan | None
    _names: dict[str, Any] = field(init=False)
    _results: dict[str, Envelope] = field(default_factory=dict)
    _patches: list[tuple[list[str], Any]] = field(default_factory=list)
    _tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    _decisions: dict[str, Decisions] = field(default_factory=dict)
    _exposed: list[str] = field(default_factory=list)
    _jumps: int = 0

    def __post_init__(self) -> None:
        self._names = {"results": {}, "_prev": None, "_task": None, "_attempt": self.command.attempt}
        self.scope = self.scope.with_locals(self._names)

    async def run(self) -> Outcome:
        """Runs the tasks and returns their outcome; never raises for a task's failure."""
        started = time.perf_counter()
        try:
            envelope = await self._run_tasks()
            if envelope["status"] == OK:
                envelope = await self._finish(envelope)
        except TASK_ERRORS as error:
            envelope = error_envelope(error)
        except Exception as error:
            envelope = error_envelope(defect(error, "the result", self.command.step))
        if self._exposed:
            envelope["secrets"] = [*envelope.get("secrets", ()), *self._exposed][:MOST_FIELDS]
        return Outcome(
            envelope=envelope,
            patches=self._patches,
            tasks=list(self._tasks.values()),
            duration=time.perf_counter() - started,
            retryable=bool((envelope.get("error") or {}).get("retryable")),
            step_values=self.scope.step_values,
        )

    async def _run_tasks(self) -> Envelope:
        tasks, position = self.visit.program.tasks, 0
        envelope: Envelope = {"status": OK, "data": None}
        while position < len(tasks):
            task = tasks[position]
            envelope, action = await self._run_under_policy(task)
            self._results[task.name] = envelope
            match action.do:
                case Directive.FAIL:
                    return _as_failure(envelope, task)
                case Directive.BREAK:
                    break
                case Directive.JUMP:
                    position = self._target(action, position)
                case _:
                    position += 1
        return envelope if envelope["status"] == OK else {"data": None, **envelope, "status": OK}

    async def _run_under_policy(self, task: TaskProgram) -> tuple[Envelope, PolicyAction]:
        attempt = self.command.attempt if len(self.visit.program.tasks) == 1 else 1
        names, tries, before = self._names, 1, self._names["_prev"]
        while True:
            names["_task"], names["_attempt"] = task.name, attempt
            call = self._call(task, attempt, before)
            envelope, retry_after = await (call if self.span is None else self.span.called(task.task, attempt, call))
            failed = envelope["status"] != OK
            view = ResultView(envelope, self.cache)
            names["output"] = names["response"] = view
            names.pop("error", None)  # so that "error is defined" is true for failures only
            if failed:
                names["error"] = seen_error(envelope["error"])
            self._count(task, envelope)
            program, scope = self.visit.program, self.scope
            if program.policy_names_step:
                scope = scope.with_fallbacks({program.step.name: view})
            if not failed:
                self._remember(task, view)
                await self._apply(task.set, scope)
            rule = await task.rule_after(scope, self.tool_context.results.get, failed=failed)
            action = rule.action
            await self._apply(rule.set, scope)
            if failed or not rule.is_plain or task.name in self._decisions:
                self._note(task, rule, envelope, tries)
            if action.do is not Directive.RETRY:
                if failed and action.do is Directive.CONTINUE:
                    self._remember(task, view)
                return envelope, action
            if tries >= action.attempts:
                return _exhausted(envelope, task, tries), PolicyAction(do=Directive.FAIL)
            await asyncio.sleep(delay_before(action.backoff, action.delay, tries, retry_after=retry_after))
            tries += 1
            attempt += 1

    async def _call(self, task: TaskProgram, attempt: int, before: Any) -> tuple[Envelope, float | None]:
        """Renders and runs a task once; a failure becomes an envelope. ``before``: the result of the task before."""
        started = time.perf_counter()
        retry_after = None
        try:
            envelope = await self._call_tool(task, attempt, before)
        except RefusedValueError as error:
            envelope = error_envelope(error.within(f"{self.command.step}.{task.name}"), task.task.kind)
        except TASK_ERRORS as error:
            envelope = error_envelope(error, task.task.kind)
            retry_after = getattr(error, "retry_after", None)
        except Exception as error:
            failed = defect(error, task.task.kind, self.command.step)
            envelope = error_envelope(failed, task.task.kind)
        milliseconds = round((time.perf_counter() - started) * 1000, 3)
        envelope["meta"] = {"attempt": attempt, "duration_ms": milliseconds}
        return envelope, retry_after

    async def _call_tool(self, task: TaskProgram, attempt: int, before: Any) -> Envelope:
        spec, command, tool_of = task.task.spec, self.command, self.visit.execution.services.tool_of
        tool = (tool_of and tool_of(command.step, task.task)) or tool_for(task.task.kind)
        scope = self.scope
        earlier = (scope.previous if before is None else before) if task.names_result else None
        if earlier is not None:  # the same in all attempts
            scope = scope.with_fallbacks({"result": earlier})
        arguments = {**scope.input, **await self._input(task, scope)}
        for name in task.literals & arguments.keys():
            arguments[name] = parse_literal(arguments[name])
        check_input(task.task, arguments)
        scope = scope.with_input(arguments) if arguments else scope
        config = {**await render_async(task.config, scope, self.tool_context.results.get), **task.raw}
        if command.overrides:
            config, arguments = overridden(config, arguments, command.overrides)
        limit = None if spec.timeout is None else asyncio.timeout(spec.timeout)
        call = ToolCall(
            execution_id=command.execution_id,
            step=command.step,
            task=task.task,
            config=config,
            input=arguments,
            auth=await render_async(task.auth, scope, self.tool_context.results.get),
            scope=scope,
            folder=self.visit.execution.folder,
            lenient=self.visit.execution.playbook.lenient,
            command_id=command.command_id,
            attempt=attempt,
            number=self._tasks[task.name]["runs"] + 1 if task.name in self._tasks else 1,
            owner=command.owner,
            limit=limit,
            services=self.visit.execution.services,
        )
        try:
            async with _UNLIMITED if limit is None else limit:
                result = await tool.run(call, self.tool_context)
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            raise ToolError(
                f"{command.step}.{task.name} took longer than its timeout of {spec.timeout:g} s",
                kind="timeout",
                retryable=True,
            ) from None
        envelope: Envelope = {"status": OK, **legible(result.details)} if result.details else {"status": OK}
        if result.ref is not None:
            envelope["ref"] = result.ref
            if result.ref.extracted:
                envelope["extracted"] = result.ref.extracted
        else:
            envelope["data"] = result.data if result.admitted else admitted(result.data)
        plain = envelope
        if spec.result.store is not None or spec.result.select:
            envelope = await self.writer.store(envelope, command, task.task)
        if task.output is not None:
            self._names["output"] = self._names["response"] = ResultView(envelope, self.cache)
            scope = scope.with_fallbacks({})
            shaped = await render_async(task.output, scope, self.tool_context.results.get)
            envelope = {"status": OK, "data": admitted(shaped, "output")}
        if task.task.asserts.returns:
            await check_result(task.task, (plain, envelope), self.cache, self.tool_context.results.get)
        return envelope

    async def _input(self, task: TaskProgram, scope: Scope) -> dict[str, Any]:
        """Renders the task's input; tools that read stored results get references to whole results."""
        if not task.references:
            return await render_input(task.input, scope, self.tool_context.results.get)
        arguments = {}
        for key, compiled in task.references.items():
            value = await with_references(self.tool_context.results.get, compiled.evaluate, scope)
            stored = value.stored if isinstance(value, (ResultView, DataView)) else None
            arguments[key] = stored or await render_async(compiled, scope, self.tool_context.results.get)
        return arguments

    async def _finish(self, envelope: Envelope) -> Envelope:
        """Makes the envelope for the log: large values stored, results of the tasks added."""
        tasks = {task.name: task.task for task in self.visit.program.tasks}
        last = self.visit.program.tasks[-1].task if tasks else None
        sealed = await self.writer.seal(envelope, self.command, last)
        sealed.pop("meta", None)
        if self.command.index is None and len(self.visit.program.tasks) > 1:
            sealed["results"] = {
                name: as_json(await self.writer.seal(result, self.command, tasks[name]))
                for name, result in self._results.items()
            }
        return sealed

    def _remember(self, task: TaskProgram, view: ResultView) -> None:
        self._names[task.name] = self._names["results"][task.name] = view
        self._names["_prev"] = view

    def _count(self, task: TaskProgram, envelope: Envelope) -> None:
        summary = self._tasks.setdefault(task.name, {"name": task.name, "runs": 0, "ms": 0.0})
        summary["status"] = envelope["status"]
        summary["runs"] += 1
        summary["ms"] = round(summary["ms"] + envelope["meta"]["duration_ms"], 3)

    def _note(self, task: TaskProgram, rule: CompiledRule, envelope: Envelope, tries: int) -> None:
        """Adds a decision of the task's policy, if it has one, to what the log keeps of the task."""
        if not task.rules:
            return
        decisions = self._decisions.get(task.name)
        if decisions is None:
            summary = self._tasks[task.name]
            decisions = self._decisions[task.name] = Decisions(task.rules, summary["runs"] - 1)
            summary["policy"] = decisions.entries
        retries = rule.action.do is Directive.RETRY
        if rule.undefined:
            self._tasks[task.name]["undefined"] = SECRETS.redacted(list(rule.undefined))
        decisions.add(rule, envelope, exhausted=retries and tries >= rule.action.attempts)

    def _target(self, action: PolicyAction, position: int) -> int:
        self._jumps += 1
        if self._jumps > JUMP_LIMIT:
            raise ToolError(
                f"step {self.visit.program.step.name}: the tasks jumped {JUMP_LIMIT} times without an end; "
                f"look at the rule that jumps to {action.to!r}",
                kind="policy",
            )
        if action.to == "previous" or action.to is None:
            return max(position - 1, 0)
        return self.visit.program.positions[action.to]

    async def _apply(self, block: CompiledSet, scope: Scope) -> None:
        if not block:
            return
        for patch in await with_references(self.tool_context.results.get, block.patches, scope, scope.stored):
            place = ".".join((patch.scope, *patch.path))
            self._exposed += exposed_in(patch.value, self.command, place).get("secrets", ())
            if patch.scope == "ctx":
                patch.apply(scope.ctx)
                self._patches.append((list(patch.path), patch.value))
            elif patch.scope == "iter" and scope.iteration is not None:
                patch.apply(scope.iteration.values)
            else:
                patch.apply(scope.step_values)


def defect(error: Exception, tool: str, step: str) -> ToolError:
    """Returns the failure of a task whose tool raised an unexpected exception, which a resumption would repeat.

    Raises:
        Exception: ``error`` itself, if it is the platform's or that of a process that is ending. The command stays
            open, and runs again when the execution is resumed.
    """
    if _is_of_platform(error):
        raise error
    logger.error("%s in step %s: a defect in the tool", tool, step, exc_info=error)
    name = type(error).__name__
    text = f"{tool} in step {step}: {name}: {error}"
    return ToolError(text, kind="unknown", code=name)


def _is_of_platform(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_of_platform, error.exceptions))
    if isinstance(error, RuntimeError) and str(error).startswith(_ENDING):
        return True
    return isinstance(error, PLATFORM_ERRORS) or not isinstance(error, Exception)


def _as_failure(envelope: Envelope, task: TaskProgram) -> Envelope:
    if envelope["status"] == ERROR:
        return envelope
    error = ToolError(f"task {task.name!r}: its policy failed the step", kind="policy")
    details = {key: envelope[key] for key in ("http", "pg", "py") if key in envelope}
    return error_envelope(error, task.task.kind) | details


def _exhausted(envelope: Envelope, task: TaskProgram, tries: int) -> Envelope:
    """Returns the error of the last try; a success that did not satisfy the policy becomes an error."""
    if envelope["status"] == ERROR:
        return envelope
    message = f"task {task.name!r}: still not satisfied after {tries} tries"
    return error_envelope(ToolError(message, kind="policy", code="RETRY_EXHAUSTED"), task.task.kind)


def overridden(
    config: dict[str, Any], arguments: dict[str, Any], overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Applies the overrides of a paginated request: they replace or extend the playbook's parts.

    A new address replaces the playbook's parameters, too: the link to the next page has its own.
    """
    merged = dict(config)
    if overrides.get("url"):
        merged |= {"url": overrides["url"], "params": {}}
    for key in ("params", "headers"):
        if overrides.get(key):
            merged[key] = {**(merged.get(key) or {}), **overrides[key]}
    if overrides.get("body") is not None:
        merged["json"] = overrides["body"]
    return merged, {**arguments, **(overrides.get("input") or {})}


class Decisions:
    """Counts the decisions of one task's policy: one entry for each rule and what it decided, in their first order.

    They begin with the first decision that a task without a policy would not have made.

    Args:
        rules: of the policy.
        earlier: calls before, which all succeeded and continued without a condition.
    """

    def __init__(self, rules: Sequence[CompiledRule], earlier: int) -> None:
        name = ELSE if rules[-1].when is None else DEFAULT
        self.entries: list[dict[str, Any]] = []
        if earlier:
            self.entries.append({"rule": name, "do": Directive.CONTINUE.value, "times": earlier})

    def add(self, rule: CompiledRule, envelope: Envelope, *, exhausted: bool) -> None:
        """Notes what a rule decided about an outcome. ``exhausted``: a retry for which no attempt is left."""
        entry = self._entry(rule.name, _decided(rule.action, exhausted=exhausted))
        entry["times"] += 1
        if envelope["status"] == ERROR:
            entry["error"] = _reason(envelope["error"])

    def _entry(self, name: RuleName, decided: dict[str, Any]) -> dict[str, Any]:
        for entry in self.entries:
            if entry["rule"] == name and entry["do"] == decided["do"]:
                return entry
        self.entries.append({"rule": name, **decided, "times": 0})
        return self.entries[-1]


def _decided(action: PolicyAction, *, exhausted: bool) -> dict[str, Any]:
    if exhausted:
        return {"do": "fail", "exhausted": True}
    decided = {"do": action.do.value}
    return decided | {"to": action.to} if action.do is Directive.JUMP else decided


def _reason(error: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of an error, which is redacted already, that explains a decision about it."""
    reason = {name: error[name] for name in ("kind", "status") if error.get(name) is not None}
    return reason | {"message": error["message"][:REASON_CHARACTERS]}
