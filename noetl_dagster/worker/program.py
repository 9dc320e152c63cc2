"""Compiled steps: every template is compiled once for all iterations. Rules of policies and ``retry`` blocks."""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from noetl_dagster.errors import Place, PlaybookError, Problem, TemplateError, UndefinedNameError
from noetl_dagster.playbook.assets import CheckKind, CheckSpec
from noetl_dagster.playbook.models import (
    Backoff,
    Directive,
    Loop,
    LoopMode,
    Playbook,
    PolicyAction,
    RetryRule,
    ShardGranularity,
    Sink,
    Step,
    Task,
)
from noetl_dagster.playbook.rules import DEFAULT, RuleName, rule_name, workbook_name
from noetl_dagster.playbook.templates.rendering import (
    ENDS_IN_TOJSON,
    Compiled,
    Fetch,
    compile_fields,
    compile_value,
    condition,
    undecided,
    with_references,
)
from noetl_dagster.playbook.templates.scope import CompiledSet, compile_set
from noetl_dagster.playbook.tool_kinds import LITERAL_FIELDS, REQUEST, TOOL_KINDS
from noetl_dagster.playbook.wording import is_template
from noetl_dagster.storage.exact_json import loads_exact

SHARDS_HERE, SHARDS_IN_POOL = 64, 768
LONGEST_DELAY = 60.0
JITTER = 0.1


@dataclass(frozen=True)
class CompiledRule:
    """One policy rule. ``when`` of None is the ``else`` rule. ``name``: its number from 0, ``else`` or ``default``.

    Attributes:
        undefined: why rules before it could not be decided.
    """

    when: Compiled | None
    action: PolicyAction
    set: CompiledSet
    name: RuleName = DEFAULT
    undefined: tuple[str, ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """Reports that it lets a success continue as if the task had no policy."""
        return self.when is None and self.action.do is Directive.CONTINUE and not self.undefined


_FAIL = CompiledRule(None, PolicyAction(do=Directive.FAIL), compile_set({}, in_loop=False))
_CONTINUE = CompiledRule(None, PolicyAction(do=Directive.CONTINUE), compile_set({}, in_loop=False))


@dataclass(frozen=True, slots=True)
class Continuation:
    """One entry of a ``retry`` block. If it ``is_for_failures``, it never applies to a success."""

    rule: RetryRule
    when: Compiled
    next_call: Compiled | None
    is_for_failures: bool


@dataclass(frozen=True, slots=True)
class TaskProgram:
    """A task with its templates and rules compiled.

    Attributes:
        literals: keys of the input of Python code, the step's too, whose text a template composes, of several parts or
            with ``tojson``: it is parsed if it is the literal of a list or mapping.
        names_result: one that the tool gets uses ``result``.
    """

    task: Task
    raw: dict[str, Any]
    config: Compiled
    input: Compiled
    references: dict[str, Compiled]
    auth: Compiled
    output: Compiled | None
    set: CompiledSet
    rules: tuple[CompiledRule, ...]
    continuations: tuple[Continuation, ...]
    names_result: bool
    literals: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def policy_names(self) -> frozenset[str]:
        """Names that its rules and its ``set`` use."""
        rules = (rule.set.names | (rule.when.names if rule.when is not None else set()) for rule in self.rules)
        return self.set.names.union(*rules)

    async def rule_after(self, scope: Mapping[str, Any], fetch: Fetch, *, failed: bool) -> CompiledRule:
        """Returns the first rule whose ``when`` is true, or else the ``else`` rule.

        If there is neither, failures fail without a policy, and everything else continues.

        A ``when`` that uses a field that the output does not have (``output.http.status`` of a call without a response)
        does not match. After a failed call no ``when`` matches that cannot be computed, such as the length of missing
        data, so that it hides neither the error nor a later rule.

        Raises:
            UndefinedNameError: after a success, no rule matches, and one of them names what does not exist.
        """
        chosen, undefined = (_CONTINUE if self.rules or not failed else _FAIL), list[str]()
        for rule in self.rules:
            if rule.when is None or await matches(rule.when, scope, fetch, undefined, failed=failed):
                chosen = rule
                break
        if undefined and chosen is _CONTINUE:
            if not failed:
                raise undecided(f"rule of task {self.name!r}", undefined)
            chosen = _FAIL
        return replace(chosen, undefined=tuple(undefined)) if undefined else chosen


@dataclass(frozen=True)
class StepProgram:
    """A step with its tasks, input, loop and routing compiled.

    Attributes:
        reached: ``state.key`` if it is a template.
        policy_names_step: a rule or ``set`` of a task uses the name of the step, for its output so far.
    """

    step: Step
    tasks: tuple[TaskProgram, ...]
    positions: dict[str, int]
    input: Compiled
    output: Compiled | None
    set: CompiledSet
    admit: Compiled | None
    collection: Compiled | None
    arcs: tuple[tuple[Compiled, CompiledSet], ...]
    checks: tuple[tuple[CheckSpec, Compiled | None], ...] = ()
    reached: Compiled | None = None
    policy_names_step: bool = False

    @property
    def moves_with_command(self) -> bool:
        """Reports that the watermark moves in the transaction of the step's only command and its sink.

        Items and pages come in any order, and staged parts are not published yet: with these it moves when the step has
        succeeded.
        """
        if self.sink is None or self.sink.is_staged or self.step.loop is not None:
            return False
        return not any(one.rule.continues_success for task in self.tasks for one in task.continuations)

    @cached_property
    def in_pool(self) -> bool:
        """Reports that its commands run in worker processes. Child playbooks are routing, and stay in the driver.

        So do steps that make chunks for others, since slower consumers slow them down in the process that drives both.
        """
        if self.step.streams_to:
            return False
        if self.sink is not None and self.sink.is_local:
            return False  # the driver publishes what is staged; a worker may be on another machine
        return self.step.wants_workers and all(task.task.kind != "playbook" for task in self.tasks)

    @property
    def shards_in_flight(self) -> int:
        """Shards of one group in flight at the same time. In the pool, slots bound how many of them run."""
        loop = self.step.loop
        limit = None if loop is None else loop.fanout.max_concurrent
        return limit or (SHARDS_IN_POOL if self.in_pool else SHARDS_HERE)

    @cached_property
    def keeps_to_driver(self) -> bool:
        """Reports that its commands run only in the process that drives the execution."""
        if any(task.task.config.get("pipes") for task in self.tasks):  # the driver receives the job's messages
            return True
        if self.step.streams_to:  # whose chunks are numbered in one process
            return True
        if self.sink is not None and self.sink.tool in ("duckdb", "sqlite"):  # one process writes at a time
            return True
        kinds = (TOOL_KINDS.get(task.task.kind) for task in self.tasks)
        return any(kind is None or kind.keeps_to_driver for kind in kinds)

    @property
    def settings(self) -> dict[str, str]:
        """Numbers and booleans that are templates, rendered when the step is entered; by their location."""
        inside = [task.task.settings for task in self.tasks]
        return self.step.settings | {name: text for own in inside for name, text in own.items()}

    @cached_property
    def telling_task(self) -> str:
        """The task whose calls may publish chunks of the step's result: the last, if no attempt follows a success."""
        entries = (entry for task in self.tasks for entry in task.continuations)
        return self.tasks[-1].name if self.tasks and all(entry.is_for_failures for entry in entries) else ""

    @property
    def loop(self) -> Loop:
        """The loop of a step that has one."""
        assert self.step.loop is not None
        return self.step.loop

    @property
    def partitions(self) -> int | None:
        """Minimum number of partitions of a fan-out, or None when each of its shards is an item."""
        loop = self.step.loop
        if loop is None or not self.step.is_fanout or loop.fanout.granularity is ShardGranularity.ITEM:
            return None
        return loop.fanout.max_groups

    @property
    def kind(self) -> str:
        """Kind of the first task's tool, which the step's commands carry."""
        return self.tasks[0].task.kind if self.tasks else "noop"

    @cached_property
    def retries(self) -> bool:
        """Reports that a task has a ``retry`` block, so that each attempt is a command of its own."""
        return any(task.continuations for task in self.tasks)

    @cached_property
    def sink(self) -> Sink | None:
        """The sink of each iteration's or attempt's result: a task's, or that of a rule of its ``retry``."""
        for task in self.tasks:
            for sink in (task.task.sink, *(entry.rule.sink for entry in task.continuations)):
                if sink is not None:
                    return sink
        return None


def compile_step(playbook: Playbook, step: Step) -> StepProgram:
    """Compiles a step. Raises ``PlaybookError`` for an unknown workbook task, ``TemplateError`` for a bad template."""
    tasks = tuple(_compile_task(playbook, task, step) for task in step.tasks)
    collection, when = None, partial(condition, strict=playbook.strict)
    if step.loop is not None and step.loop.cursor is None and step.loop.mode is not LoopMode.STREAM:
        collection = compile_value(step.loop.collection)
    return StepProgram(
        step=step,
        tasks=tasks,
        positions={task.name: place for place, task in enumerate(tasks)},
        input=compile_value(step.input),
        output=None if step.output is None else compile_value(step.output),
        set=compile_set(step.set, in_loop=False),
        admit=None if step.spec.admit is None else when(step.spec.admit),
        collection=collection,
        arcs=tuple((when(arc.when), compile_set(arc.set, in_loop=False)) for arc in step.routing.arcs),
        checks=tuple((check, when(check.asks) if check.kind is CheckKind.WHEN else None) for check in step.checks),
        reached=None if step.state is None or not is_template(step.state.key) else compile_value(step.state.key),
        policy_names_step=any(step.name in task.policy_names for task in tasks),
    )


def _compile_task(playbook: Playbook, task: Task, step: Step) -> TaskProgram:
    in_loop = step.loop is not None
    if task.kind == "workbook":
        task = _workbook_task(playbook, task)
    kind = TOOL_KINDS.get(task.kind)
    fields = {key: value for key, value in task.config.items() if key not in LITERAL_FIELDS}
    config = compile_fields(fields, () if kind is None else kind.commands, () if kind is None else kind.sent)
    input, auth = compile_value(task.input), compile_value(task.auth)
    return TaskProgram(
        task=task,
        raw={key: value for key, value in task.config.items() if key in LITERAL_FIELDS},
        config=config,
        input=input,
        references={
            key: compile_value(value)
            for key, value in (task.input.items() if isinstance(task.input, dict) else ())
            if kind is not None and kind.takes_references
        },
        auth=auth,
        output=None if task.output is None else compile_value(task.output),
        set=compile_set(task.set, in_loop=in_loop),
        rules=tuple(
            CompiledRule(
                when=None if rule.when is None else condition(rule.when, strict=playbook.strict),
                action=rule.then,
                set=compile_set(rule.then.set, in_loop=in_loop),
                name=rule_name(number, rule),
            )
            for number, rule in enumerate(task.spec.policy)
        ),
        continuations=tuple(
            Continuation(
                rule=rule,
                when=condition(rule.when, strict=playbook.strict),
                next_call=None
                if rule.next_call is None
                else compile_fields(rule.next_call.model_dump(exclude_defaults=True), (), REQUEST),
                is_for_failures=not rule.continues_success and condition(rule.when).is_about_failures,
            )
            for rule in task.retry
        ),
        names_result="result" in config.names | input.names | auth.names,
        literals=_composed_in(step.input, task.input) if task.kind == "python" else frozenset(),
    )


def _composed_in(*inputs: Any) -> frozenset[str]:
    """Returns the keys whose value in the last input with that key is composed text."""
    values = {key: value for input in inputs if isinstance(input, dict) for key, value in input.items()}
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    return frozenset(
        key for key, text in texts.items() if compile_value(text).is_composed or ENDS_IN_TOJSON.search(text)
    )


def parse_literal(value: Any) -> Any:
    """Returns text that is a JSON or Python literal of a list or mapping parsed; everything else unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return loads_exact(value)
    except ValueError:
        pass
    try:
        parsed = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return parsed if isinstance(parsed, list | dict) else value


def _workbook_task(playbook: Playbook, task: Task) -> Task:
    """Returns the named task of the root ``workbook``, with the caller's name, input and policies on top."""
    wanted = workbook_name(task)
    named = playbook.workbook.get(wanted)
    if named is None:
        names = ", ".join(sorted(playbook.workbook)) or "none"
        place = task.place or Place(playbook.file, 1)
        raise PlaybookError([Problem(place, f"no workbook task {wanted!r}; known: {names}")])
    own, callers = named.input, task.input  # a template of the whole input replaces the workbook task's own
    return named.model_copy(
        update={
            "name": task.name,
            "input": {**own, **callers} if isinstance(own, dict) and isinstance(callers, dict) else callers or own,
            "set": {**named.set, **task.set},
            "output": named.output if task.output is None else task.output,
            "spec": task.spec if task.spec.policy else named.spec,
            "retry": task.retry or named.retry,
            "sink": task.sink or named.sink,
        }
    )


async def matches(
    when: Compiled, scope: Mapping[str, Any], fetch: Fetch, undefined: list[str], *, failed: bool
) -> bool:
    """Evaluates the condition of a rule; one that names what does not exist is false, and is added to ``undefined``.

    Raises:
        TemplateError: after a success it cannot be computed, or it is strict and names what does not exist.
    """
    try:
        return await with_references(fetch, when.holds, scope)
    except UndefinedNameError as error:
        if when.is_strict and not failed:
            raise
        undefined.append(str(error))
    except TemplateError:
        if not failed:
            raise
    return False


def delay_before(
    backoff: Backoff, delay: float, retries: int, *, retry_after: float | None = None, most: float = LONGEST_DELAY
) -> float:
    """Returns the seconds to wait before a try, after ``retries`` (1, 2, 3, ...) and as the peer requested.

    A delay does not grow above ``most``.
    """
    exponential = 2.0 ** min(retries - 1, 32)
    factor = {Backoff.NONE: 1.0, Backoff.LINEAR: float(retries), Backoff.EXPONENTIAL: exponential}[backoff]
    seconds = min(delay * factor, max(delay, most)) * (1 + random.uniform(0, JITTER))
    return max(seconds, retry_after or 0.0)
