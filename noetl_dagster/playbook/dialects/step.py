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
    kept_as,
    layered_block,
    outer_task_spec,
    read_keeping,
    read_step_spec,
)
from noetl_dagster.playbook.dialects.spelling import (
    DESCRIPTION,
    DOCUMENTARY,
    INPUT,
    STEP_KEYS,
    STEP_REMEDIES,
)
from noetl_dagster.playbook.dialects.tool import UNKNOWN, read_task, read_tasks
from noetl_dagster.playbook.models import Loop, LoopMode, ResultSpec, StateSpec, Step, Task
from noetl_dagster.playbook.tool_kinds import AUTH, TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_template

_COLUMN = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
_EXAMPLE = 'state: {key: updated_at, initial: "1970-01-01T00:00:00Z"}'


def read_state(block: Block) -> StateSpec | None:
    """``{key, initial, name}``; None where the step keeps nothing."""
    value = block.take("state")
    if value is None:
        return None
    if not isinstance(value, dict):
        block.error(f"state must be a mapping such as {_EXAMPLE}, found {described(value)}", "state")
        return None
    child = block.child("state")
    assert child is not None
    key, name = child.text("key"), child.text("name")
    initial = child.take("initial")
    child.close(StateSpec.model_fields)
    for missing in (one for one in ("key", "initial") if one not in child):
        child.error(f"{child.what} needs {missing!r}; write {_EXAMPLE}", kind=ProblemKind.MISSING_FIELD)
    if isinstance(initial, (dict, list, bool)):
        child.error(f"initial is one number or text, or a template, found {described(initial)}", "initial")
    if key is None:
        return None
    if not is_template(key) and _COLUMN.fullmatch(key) is None:
        child.error(
            f"key is {described(key)}; name a column of the result's rows, as updated_at or meta.updated_at, "
            'or write a template over output, as "{{ output.next }}"',
            "key",
        )
    return child.build(StateSpec, key=key, initial=initial, name=name)


_FIELDS_OF_TOOLS = frozenset(
    chain.from_iterable(words for kind in TOOL_KINDS.values() for words in kind.fields)
) | {
    "auth",
    "kind",
}


def read_step(block: Block) -> Step | None:
    """A step; what is wrong with it is reported to the document."""
    name = block.text("step")
    if name is None:
        block.error("a step needs 'step', its name", kind=ProblemKind.MISSING_FIELD)
        return None
    block.what = f"step {name!r}"
    block.reading.templates = {}
    own_spec = block.child("spec") or Block(block.reading, {}, f"{block.what}, spec", block.place)
    spec = layered_block(own_spec, own_spec.what, block.reading.executor_spec)
    fed = name in block.reading.fed
    loop = _loop(block, spec, fed=fed)
    if fed:
        check_fed_spec(own_spec)
    loop_spec = _loop_spec(block)
    outer = (
        outer_task_spec(block.document, block.reading.executor_spec),
        outer_task_spec(block.document, own_spec.values),
        outer_task_spec(block.document, loop_spec),
    )
    output, kept = read_keeping(block, ResultSpec())
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
        tasks=_kept(_with_older_blocks(block, _tasks(block, outer)), kept),
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
        _check_empty(block)
    _close(block)
    return step


def _check_empty(block: Block) -> None:
    """A bare name marks the end of a branch; anything more was meant to do something."""
    if set(block.values) <= {"step", *DESCRIPTION}:
        message = "neither 'tool' nor 'next': the step does nothing and ends its branch"
        block.warn(message, kind=ProblemKind.EMPTY_STEP)
    else:
        block.error("a step needs 'tool' or 'next'", kind=ProblemKind.MISSING_FIELD)


def _loop(block: Block, spec: Block, *, fed: bool) -> Loop | None:
    loop_block = block.child("loop")
    if fed:
        return FED if loop_block is None else read_fed_loop(loop_block)
    own = block.values.get("spec")
    own_mode = own.get("loop_mode") if isinstance(own, dict) else None
    loop = None if loop_block is None else read_loop(loop_block, spec, step_decides=own_mode is not None)
    if "loop" not in block and own_mode == LoopMode.FANOUT:
        message = "loop_mode: fanout needs a 'loop' with 'in' and 'iterator'"
        block.error(message, kind=ProblemKind.MISSING_FIELD)
    return loop


def _loop_spec(block: Block) -> dict[str, Any]:
    loop = block.values.get("loop")
    spec = loop.get("spec") if isinstance(loop, dict) else None
    return spec if isinstance(spec, dict) else {}


def _tasks(block: Block, outer: tuple[dict[str, Any], ...]) -> tuple[Task, ...]:
    if isinstance(block.values.get("tool"), str):
        return _seed_tool(block, outer)
    return read_tasks(block, outer)


def _seed_tool(block: Block, outer: tuple[dict[str, Any], ...]) -> tuple[Task, ...]:
    """The seeds' oldest shape: ``tool: http`` with the tool's fields beside it."""
    block.spelled("tool")
    known = TOOL_KINDS.get(block["tool"], UNKNOWN)
    fields = {*chain.from_iterable(known.fields), *known.without_effect, *AUTH} - {"step"}
    if known.name_fills is not None:
        fields.add("name")
    beside = [key for key in block.values if key in fields]
    block.drop(*beside)
    values = block.document.gathered(
        [(block.values, "tool", "kind"), *((block.values, key, key) for key in beside)]
    )
    task = read_task(Block(block.reading, values, block.what, block.place_of("tool")), outer)
    return () if task is None else (task,)


def _with_older_blocks(block: Block, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """``retry`` and ``sink`` of a step belong to the task whose result is the step's: the last."""
    retry, sink = read_retry(block), read_sink(block)
    if not (retry or sink) or not tasks:
        return tasks
    last = tasks[-1]
    update = {"retry": last.retry or retry, "sink": last.sink or sink}
    return (*tasks[:-1], last.model_copy(update=update))


def _kept(tasks: tuple[Task, ...], kept: ResultSpec) -> tuple[Task, ...]:
    """Passes the step's storage settings to its last task, whose result is the step's."""
    if not tasks or kept == ResultSpec():
        return tasks
    last = tasks[-1]
    spec = last.spec.model_copy(update={"result": kept_as(last.spec.result, kept)})
    return (*tasks[:-1], last.model_copy(update={"spec": spec}))


def _close(block: Block) -> None:
    """Reports what is left: most often fields of a tool that stand beside it."""
    beside = [key for key in block.rest() if key in _FIELDS_OF_TOOLS]
    for key in beside:
        where = (
            "beside 'tool' instead of inside it" if "tool" in block else "in the step instead of in a tool"
        )
        place = block.document.key_place(block.values, key)
        message = f"{block.what}: {key!r} stands {where}; indent it under 'tool', next to 'kind'"
        block.document.report(place, message, kind=ProblemKind.MISPLACED_FIELD)
    block.drop(*beside, *DOCUMENTARY)
    block.close(STEP_KEYS, remedies=STEP_REMEDIES)
