"""Runs the tasks of a step once, under their policies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from noetl_dagster.errors import CredentialError, NoetlError, StorageError, TemplateError, ToolError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, error_envelope
from noetl_dagster.playbook.models import Directive, PolicyAction, Task
from noetl_dagster.playbook.templates.failures import seen_error
from noetl_dagster.playbook.templates.rendering import render_async, render_input, with_references
from noetl_dagster.playbook.templates.scope import CompiledSet, Patch, Scope
from noetl_dagster.playbook.templates.views import DataView, ReferenceCache, ResultView
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.policy import default_action, delay_before, matching_rule
from noetl_dagster.worker.program import StepProgram, TaskProgram
from noetl_dagster.worker.results import ResultWriter, check_input, check_result
from noetl_dagster.worker.spans import CommandSpan

JUMP_LIMIT = 10_000
"""Jumps of one run of a pipeline, at most."""

TASK_ERRORS = (ToolError, TemplateError, CredentialError, StorageError)
"""Expected failures of a task: they name the cause and the place."""

PLATFORM_ERRORS = (NoetlError, *DATABASE_AWAY, MemoryError, BrokenExecutor)
"""Errors that are not a task's: the log cannot be reached, or the execution was cancelled, for example."""

_ENDING = ("cannot schedule new futures", "can't start new thread", "Session is closed")
"""First words of the errors of a process that is ending, or out of resources."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNLIMITED = nullcontext()


@dataclass(slots=True)
class _Run:
    """The mutable state of a running pipeline."""

    program: StepProgram
    command: Command
    scope: Scope
    cache: ReferenceCache
    names: dict[str, Any]
    results: dict[str, Envelope] = field(default_factory=dict)
    patches: list[tuple[list[str], Any]] = field(default_factory=list)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    span: CommandSpan | None = None
    last: Envelope | None = None
    jumps: int = 0


class Pipeline:
    """Runs a step's tasks one after another, each under its policy."""

    def __init__(self, box: Toolbox, result_writer: ResultWriter) -> None:
        self._box = box
        self._sealer = result_writer

    async def run(
        self,
        program: StepProgram,
        command: Command,
        scope: Scope,
        cache: ReferenceCache,
        *,
        folder: str = ".",
        span: CommandSpan | None = None,
    ) -> Outcome:
        """Runs the tasks of ``program`` and returns their outcome; never raises for a task's failure.

        Args:
            scope: names of the step, its input and iteration included.
            cache: results fetched so far; dropped by the caller with the command.
            folder: folder of the playbook file, for relative paths.
            span: the command's span, which records the calls; None if no trace is recorded.
        """
        started = time.perf_counter()
        names: dict[str, Any] = {"results": {}, "_prev": None, "_task": None, "_attempt": command.attempt}
        run = _Run(program, command, scope.with_locals(names), cache, names, span=span)
        try:
            envelope = await self._run_tasks(run, folder)
            if envelope["status"] == OK:
                envelope = await self._finish(run, envelope)
        except TASK_ERRORS as error:
            envelope = error_envelope(error)
        return Outcome(
            envelope=envelope,
            patches=run.patches,
            tasks=list(run.tasks.values()),
            duration=time.perf_counter() - started,
            retryable=bool((envelope.get("error") or {}).get("retryable")),
            step_values=run.scope.step_values,
        )

    async def _run_tasks(self, run: _Run, folder: str) -> Envelope:
        tasks = run.program.tasks
        position = 0
        while position < len(tasks):
            task = tasks[position]
            envelope, action = await self._run_under_policy(run, task, folder)
            run.last = run.results[task.name] = envelope
            match action.do:
                case Directive.FAIL:
                    return _as_failure(envelope, task)
                case Directive.BREAK:
                    return _as_success(envelope)
                case Directive.JUMP:
                    position = self._target(run, action, position)
                case _:
                    position += 1
        return _as_success(run.last) if run.last is not None else {"status": OK, "data": None}

    async def _run_under_policy(
        self, run: _Run, task: TaskProgram, folder: str
    ) -> tuple[Envelope, PolicyAction]:
        attempt = run.command.attempt if len(run.program.tasks) == 1 else 1
        tries = 1
        while True:
            run.names["_task"], run.names["_attempt"] = task.name, attempt
            if run.span is None:
                envelope, retry_after = await self._call(run, task, attempt, folder)
            else:
                with run.span.calling(task.task, attempt) as call:
                    envelope, retry_after = await self._call(run, task, attempt, folder)
                    call.envelope = envelope
            failed = envelope["status"] != OK
            view = ResultView(envelope, run.cache)
            run.names["output"] = run.names["response"] = view
            run.names.pop("error", None)  # so that "error is defined" is true for failures only
            if failed:
                run.names["error"] = seen_error(envelope["error"])
            self._count(run, task, envelope)
            if not failed:
                self._remember(run, task, view)
                await self._apply(run, task.set)
            rule = await matching_rule(task, run.scope, self._fetch, failed=failed)
            action = default_action(task, failed=failed) if rule is None else rule.action
            if rule is not None:
                await self._apply(run, rule.set)
            if action.do is not Directive.RETRY:
                if failed and action.do is Directive.CONTINUE:
                    self._remember(run, task, view)
                return envelope, action
            if tries >= action.attempts:
                return _exhausted(envelope, task, tries), PolicyAction(do=Directive.FAIL)
            await asyncio.sleep(delay_before(action.backoff, action.delay, tries, retry_after=retry_after))
            tries += 1
            attempt += 1

    async def _call(
        self, run: _Run, task: TaskProgram, attempt: int, folder: str
    ) -> tuple[Envelope, float | None]:
        """Renders and runs a task once; a failure becomes an envelope."""
        started = time.perf_counter()
        retry_after = None
        try:
            envelope = await self._call_tool(run, task, attempt, folder)
        except TASK_ERRORS as error:
            envelope = error_envelope(error, task.task.kind)
            retry_after = getattr(error, "retry_after", None)
        except Exception as error:
            failed = defect(error, task.task.kind, run.command.step, self._box)
            envelope = error_envelope(failed, task.task.kind)
        envelope["meta"] = {
            "attempt": attempt,
            "duration_ms": round((time.perf_counter() - started) * 1000, 3),
        }
        return envelope, retry_after

    async def _call_tool(self, run: _Run, task: TaskProgram, attempt: int, folder: str) -> Envelope:
        spec = task.task.spec
        given = {**run.scope.input, **await self._input(run, task)}
        check_input(task.task, given)
        scope = run.scope.with_input(given) if given else run.scope
        config = {**await render_async(task.config, scope, self._fetch), **task.raw}
        overrides = run.command.overrides
        if overrides:
            config, given = _overridden(config, given, overrides)
        limit = None if spec.timeout is None else asyncio.timeout(spec.timeout)
        call = ToolCall(
            execution_id=run.command.execution_id,
            step=run.command.step,
            task=task.task,
            config=config,
            input=given,
            auth=await render_async(task.auth, scope, self._fetch),
            scope=scope,
            folder=folder,
            command_id=run.command.command_id,
            attempt=attempt,
            number=run.tasks[task.name]["runs"] + 1 if task.name in run.tasks else 1,
            owner=run.command.owner,
            limit=limit,
        )
        try:
            async with _UNLIMITED if limit is None else limit:
                result = await tool_for(task.task.kind).run(call, self._box)
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            raise ToolError(
                f"{run.command.step}.{task.name} took longer than its timeout of {spec.timeout:g} s",
                kind="timeout",
                retryable=True,
            ) from None
        envelope: Envelope = {"status": OK, **result.details}
        if result.ref is not None:
            envelope["ref"] = result.ref
            if result.ref.extracted:
                envelope["extracted"] = result.ref.extracted
        else:
            envelope["data"] = result.data
        plain = envelope
        if spec.result.store is not None or spec.result.select:
            envelope = await self._sealer.store(envelope, run.command, task.task)
        if task.output is not None:
            view = ResultView(envelope, run.cache)
            run.names["output"] = run.names["response"] = view
            envelope = {"status": OK, "data": await render_async(task.output, scope, self._fetch)}
        if task.task.asserts.returns:
            await check_result(task.task, (plain, envelope), run.cache, self._fetch)
        return envelope

    async def _input(self, run: _Run, task: TaskProgram) -> dict[str, Any]:
        """Renders the task's input; tools that read stored results get references to whole results."""
        if not task.references:
            return await render_input(task.input, run.scope, self._fetch)
        given = {}
        for key, compiled in task.references.items():
            value = await with_references(partial(compiled.evaluate, run.scope), self._fetch)
            stored = value.stored if isinstance(value, (ResultView, DataView)) else None
            given[key] = stored or await render_async(compiled, run.scope, self._fetch)
        return given

    async def _finish(self, run: _Run, envelope: Envelope) -> Envelope:
        """Makes the envelope for the log: large values stored, results of the tasks added."""
        last = run.program.tasks[-1].task if run.program.tasks else None
        sealed = await self._sealer.seal(envelope, run.command, last)
        sealed.pop("meta", None)
        if run.command.index is None and len(run.program.tasks) > 1:
            sealed["results"] = {
                name: await self._sealer.seal(result, run.command, self._task(run, name))
                for name, result in run.results.items()
            }
        return sealed

    def _task(self, run: _Run, name: str) -> Task:
        return run.program.tasks[run.program.positions[name]].task

    def _remember(self, run: _Run, task: TaskProgram, view: ResultView) -> None:
        run.names[task.name] = run.names["results"][task.name] = view
        run.names["_prev"] = view

    def _count(self, run: _Run, task: TaskProgram, envelope: Envelope) -> None:
        summary = run.tasks.setdefault(task.name, {"name": task.name, "runs": 0, "ms": 0.0})
        summary["status"] = envelope["status"]
        summary["runs"] += 1
        summary["ms"] = round(summary["ms"] + envelope["meta"]["duration_ms"], 3)

    def _target(self, run: _Run, action: PolicyAction, position: int) -> int:
        run.jumps += 1
        if run.jumps > JUMP_LIMIT:
            raise ToolError(
                f"step {run.program.step.name}: the tasks jumped {JUMP_LIMIT} times without an end; "
                f"look at the rule that jumps to {action.to!r}",
                kind="policy",
            )
        if action.to == "previous" or action.to is None:
            return max(position - 1, 0)
        return run.program.positions[action.to]

    async def _apply(self, run: _Run, block: CompiledSet) -> None:
        if not block:
            return
        patches = await with_references(lambda: block.patches(run.scope, run.scope.stored), self._fetch)
        for patch in patches:
            self._write(run, patch)

    def _write(self, run: _Run, patch: Patch) -> None:
        if patch.scope == "ctx":
            patch.apply(run.scope.ctx)
            run.patches.append((list(patch.path), patch.value))
        elif patch.scope == "iter" and run.scope.iteration is not None:
            patch.apply(run.scope.iteration.values)
        else:
            patch.apply(run.scope.step_values)

    @property
    def _fetch(self) -> Callable[[Any], Any]:
        return self._box.results.get


def defect(error: Exception, tool: str, step: str, box: Toolbox) -> ToolError:
    """Returns the failure of a task whose tool raised an unexpected exception, which a resumption would repeat.

    Raises:
        Exception: ``error`` itself, if it is the platform's or that of a process that is ending. The command stays
            open, and runs again when the execution is resumed.
    """
    if _is_of_platform(error):
        raise error
    logger.error("%s in step %s: a defect in the tool", tool, step, exc_info=error)
    name = type(error).__name__
    text = box.credentials.redact(f"{tool} in step {step}: {name}: {error}")
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
    return error_envelope(error, task.task.kind) | {
        key: envelope[key] for key in ("http", "pg", "py") if key in envelope
    }


def _as_success(envelope: Envelope) -> Envelope:
    return envelope if envelope["status"] == OK else {"data": None, **envelope, "status": OK}


def _exhausted(envelope: Envelope, task: TaskProgram, tries: int) -> Envelope:
    """Returns the error of the last try; a success that did not satisfy the policy becomes an error."""
    if envelope["status"] == ERROR:
        return envelope
    error = ToolError(
        f"task {task.name!r}: still not satisfied after {tries} tries", kind="policy", code="RETRY_EXHAUSTED"
    )
    return error_envelope(error, task.task.kind)


def _overridden(
    config: dict[str, Any], given: dict[str, Any], overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Applies the overrides of a paginated request: they replace or extend the playbook's parts."""
    merged = dict(config)
    for key in ("params", "headers"):
        if overrides.get(key):
            merged[key] = {**(config.get(key) or {}), **overrides[key]}
    if overrides.get("url"):
        merged["url"] = overrides["url"]
    if overrides.get("body") is not None:
        merged["json"] = overrides["body"]
    return merged, {**given, **(overrides.get("input") or {})}


@lru_cache(maxsize=64)
def playbook_folder(file: str) -> str:
    """Returns the folder of a playbook file."""
    return str(Path(file).parent) if file else "."
