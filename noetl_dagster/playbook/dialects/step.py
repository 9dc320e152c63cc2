"""Reads one step of the workflow."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.asset import read_asset, read_checks, read_sources
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.loop import FED, check_fed_spec, read_fed_loop, read_loop
from noetl_dagster.playbook.dialects.retry import read_retry, read_sink
from noetl_dagster.playbook.dialects.routing import read_next, read_set
from noetl_dagster.playbook.dialects.spec import (
    check_step_spec,
    layered_block,
    merged_results,
    outer_task_spec,
    read_keeping,
    read_step_spec,
    read_task_spec,
)
from noetl_dagster.playbook.dialects.tool import UNKNOWN, read_task, read_tasks
from noetl_dagster.playbook.models import LoopMode, ResultSpec, StateSpec, Step, Task
from noetl_dagster.playbook.tool_kinds import DESCRIPTION, DOCUMENTARY, INPUT, TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_template

_REMEDIES = {
    "case": "routes are written as next: {arcs: [{step, when}]}",
    "eval": "rules are written in the tool's spec: {policy: {rules: [{when, then}]}}",
    "when": "admission is written as spec: {policy: {admit: {rules: [{when, then: {allow: true}}]}}}",
    "name": "a step is named by 'step'",
    "type": "the kind of a tool is written as tool: {kind: ...}",
}
_COLUMN = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
_EXAMPLE = 'state: {key: updated_at, initial: "1970-01-01T00:00:00Z"}'


def read_state(block: Block) -> StateSpec | None:
    """Reads ``{key, initial, name, concurrent}``; returns None if the step keeps no watermark."""
    child = block.child("state", expected=f"state must be a mapping such as {_EXAMPLE}")
    if child is None:
        return None
    fields = child.fields(StateSpec)
    child.close()
    for missing in (one for one in ("key", "initial") if one not in child):
        child.missing(f"{child.what} needs {missing!r}; write {_EXAMPLE}")
    key, initial = fields["key"], fields["initial"]
    if isinstance(initial, (dict, list, bool)):
        child.error(f"initial is one number or text, or a template, found {described(initial)}", "initial")
    if key is None:
        return None
    if not is_template(key) and _COLUMN.fullmatch(key) is None:
        columns = "name a column of the result's rows, as updated_at or meta.updated_at"
        remedy = f'{columns}, or write a template over output, as "{{{{ output.next }}}}"'
        child.error(f"key is {described(key)}; {remedy}", "key")
    return child.build(StateSpec, **fields)


def read_step(block: Block) -> Step | None:
    """Reads a step; reports problems to the document."""
    name = block.text("step")
    if name is None:
        block.missing("a step needs 'step', its name")
        return None
    block.what = f"step {name!r}"
    block.reading.templates = {}
    own_spec = block.child("spec") or Block(block.reading, {}, f"{block.what}, spec", block.place)
    spec = layered_block(own_spec, own_spec.what, block.reading.all_steps)
    loop_block = block.child("loop")
    if name in block.reading.fed:
        loop = FED if loop_block is None else read_fed_loop(loop_block)
        check_fed_spec(own_spec)
    else:
        own_mode = own_spec.values.get("loop_mode")
        loop = None if loop_block is None else read_loop(loop_block, spec, step_decides=own_mode is not None)
        if "loop" not in block and own_mode == LoopMode.FANOUT:
            block.missing("loop_mode: fanout needs a 'loop' with 'in' and 'iterator'")
    loop_spec = None if loop_block is None else loop_block.values.get("spec")
    specs = (block.reading.all_steps, own_spec.values, loop_spec if isinstance(loop_spec, dict) else {})
    outer = tuple(outer_task_spec(block.document, one) for one in specs)
    output, result = read_keeping(block, ResultSpec())
    step = block.build(
        Step,
        name=name,
        description=block.text(*DESCRIPTION),
        input=block.input(*INPUT),
        output=output,
        set=read_set(block),
        routing=read_next(block),
        spec=read_step_spec(spec, own_spec),
        loop=loop,
        tasks=_with_settings_of_step(block, _tasks(block, outer), result, spec, outer),
        is_asset=block.values.get("asset") is not False,
        asset=read_asset(block),
        checks=read_checks(block),
        sources=read_sources(block),
        state=read_state(block),
        settings=block.reading.templates,
        place=block.place_of("step"),
    )
    if step is not None and step.wants_workers and "pool" not in own_spec.values:
        spec_of = step.spec.model_copy(update={"pool": block.reading.worker_pool})
        step = step.model_copy(update={"spec": spec_of})
    check_step_spec(own_spec)
    if "tool" not in block and "next" not in block:
        # a bare name marks the end of a branch; anything more was meant to do something
        if block.values.keys() <= {"step", *DESCRIPTION}:
            message = "neither 'tool' nor 'next': the step does nothing and ends its branch"
            block.warn(message, kind=ProblemKind.EMPTY_STEP)
        else:
            block.missing("a step needs 'tool' or 'next'")
    _close(block)
    return step


def _tasks(block: Block, outer: tuple[dict[str, Any], ...]) -> tuple[Task, ...]:
    kind = block.values.get("tool")
    if not isinstance(kind, str):
        return read_tasks(block, outer)
    # the oldest form: ``tool: http`` with the tool's fields beside it
    fields = TOOL_KINDS.get(kind, UNKNOWN).beside_step
    beside = [key for key in block.values if key in fields]
    block.drop("tool", *beside)
    parts = [("tool", "kind"), *((key, key) for key in beside)]
    values = block.document.gathered((block.values, *part) for part in parts)
    task = read_task(Block(block.reading, values, block.what, block.place_of("tool")), outer)
    return () if task is None else (task,)


def _with_settings_of_step(
    block: Block, tasks: tuple[Task, ...], result: ResultSpec, layered: Block, outer: tuple[dict[str, Any], ...]
) -> tuple[Task, ...]:
    """Moves ``retry``, ``sink`` and storage settings of a step to its last task, whose result is the step's.

    A ``retry`` of a spec is a default: it is for steps that do not say themselves what follows an error.
    """
    retry, sink, default = read_retry(block), read_sink(block), read_retry(layered)
    if default and not retry and not any(_looks_at_failures(task) for task in tasks):
        inherited = read_task_spec(None, outer, block).policy
        retry = default if all(task.spec.policy == inherited for task in tasks) else ()
    if not tasks or not (retry or sink or result != ResultSpec()):
        return tasks
    last = tasks[-1]
    spec = last.spec.model_copy(update={"result": merged_results(last.spec.result, result)})
    own = last.retry if _looks_at_failures(last) else (*last.retry, *retry)
    update = {"retry": own, "sink": last.sink or sink, "spec": spec}
    return (*tasks[:-1], last.model_copy(update=update))


def _looks_at_failures(task: Task) -> bool:
    return any(not rule.continues_success for rule in task.retry)


def _close(block: Block) -> None:
    """Reports what is left: most often fields of a tool that stand beside it."""
    spellings = chain.from_iterable(kind.spellings.values() for kind in TOOL_KINDS.values())
    fields = {"auth", "kind", *chain.from_iterable(spellings)} - {"metadata"}  # of an object; on a step for readers
    beside = [key for key in block.rest() if key in fields]
    where = "beside 'tool' instead of inside it" if "tool" in block else "in the step instead of in a tool"
    for key in beside:
        message = f"{key!r} stands {where}; indent it under 'tool', next to 'kind'"
        block.report_key(key, message, ProblemKind.MISPLACED_FIELD)
    block.drop(*beside, *DOCUMENTARY)
    block.close(remedies=_REMEDIES)
