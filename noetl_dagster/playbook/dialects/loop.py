"""Loops: both generations of words, with settings from step, loop and ``loop.spec``."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spec import TASK_SPEC, read_fanout
from noetl_dagster.playbook.models import LOOP_MODES, CursorSpec, FrameSpec, Loop, LoopMode
from noetl_dagster.playbook.tool_kinds import (
    CURSOR_KINDS,
    DATABASE_FILE,
    DESCRIPTION,
    LOOP_IN,
    LOOP_ITERATOR,
    LOOP_SETTINGS,
    MAX_IN_FLIGHT,
)
from noetl_dagster.playbook.wording import described, is_template

_SETTINGS = (*LOOP_SETTINGS, "policy")
_FLAGS = ("fail_fast", "allow_partial", "strict_ctx")
_RESERVED_ITERATORS = frozenset({"workload", "ctx", "iter", "loop", "input", "execution_id", "output"})

FED = Loop(iterator="chunk", mode=LoopMode.STREAM, max_in_flight=1)
"""The loop of a step that takes the chunks of another one and says nothing else: one after another."""


def read_loop(block: Block, step_spec: Block, *, step_decides: bool) -> Loop | None:
    """Reads a step's loop.

    Args:
        block: the ``loop`` mapping.
        step_spec: the step's ``spec`` over the executor's; ``loop_mode: fanout`` stands there.
        step_decides: whether ``loop_mode`` is the step's own and not the executor's.
    """
    own = _settings(block)
    collection, cursor = block.take(*LOOP_IN), _cursor(block)
    # ``loop_mode`` of the step, else the loop's own mode, else ``loop_mode`` of the executor
    outer = step_spec.choice(LoopMode, "loop_mode", also=LOOP_MODES)
    inner = own.choice(LoopMode, "mode", also=LOOP_MODES)
    mode = outer or inner if step_decides else inner or outer
    fields = {
        "collection": collection,
        "mode": LoopMode.CURSOR if cursor is not None else mode,
        "max_in_flight": own.whole(*MAX_IN_FLIGHT),
        "chunk_size": own.whole("chunk_size"),
        "cursor": cursor,
        "frame": _frame(own),
        **{name: (own if name in own else step_spec).flag(name) for name in _FLAGS},
        "fanout": read_fanout(step_spec),
    }
    loop = _built(block, own, fields)
    _check(block, mode)
    _check_collection(block, collection)
    return loop


def check_fed_spec(spec: Block) -> None:
    """Points out what a step's spec says to a loop over chunks, which has a spec of its own."""
    for name in ("allow_partial", "fail_fast", *MAX_IN_FLIGHT):
        if name in spec:
            remedy = f"write loop: {{spec: {{{name}: ...}}}}"
            message = f"{name} has no effect on a step that takes chunks; {remedy}"
            spec.error(message, name, ProblemKind.MISPLACED_FIELD)


def read_fed_loop(block: Block) -> Loop | None:
    """Reads the loop of a step that takes another step's chunks: the name of a chunk, and how many at a time."""
    own = _settings(block)
    if any(name in block for name in (*LOOP_IN, "cursor")):
        message = "feeds the step chunk by chunk, and it cannot go through something else as well"
        remedy = "leave out 'in', or loop over the rows of a chunk in a child playbook"
        block.conflict(f"an arc on: call.partial {message}; {remedy}")
    if own.choice(LoopMode, "mode", also=LOOP_MODES) not in (None, LoopMode.STREAM):
        message = "an arc on: call.partial feeds the step; leave out the mode, or say the arc on: step.done"
        own.conflict(message, "mode")
    width = own.whole(*MAX_IN_FLIGHT)
    block.drop(*LOOP_IN, "cursor")
    fields: dict[str, Any] = {"iterator": FED.iterator, "mode": LoopMode.STREAM}
    # an execution that began with no width takes one chunk after another
    fields["max_in_flight"] = FED.max_in_flight if width is None else width
    return _built(block, own, fields | {name: own.flag(name) for name in _FLAGS})


def _built(block: Block, own: Block, fields: dict[str, Any]) -> Loop | None:
    """Builds the loop of these fields and its iterator; reports the keys that are left."""
    iterator, key = block.text(*LOOP_ITERATOR), block.present(*LOOP_ITERATOR)
    loop = block.build(Loop, **(fields if iterator is None else {**fields, "iterator": iterator}))
    own.drop(*_SETTINGS, *TASK_SPEC)
    own.close(_SETTINGS)
    block.drop(*DESCRIPTION)
    block.close()
    if iterator is not None and not iterator.isidentifier():
        block.error(f"{key} {iterator!r} cannot be a name in templates; use letters, digits and _", key)
    elif iterator in _RESERVED_ITERATORS:
        block.warn(f"{key} {iterator!r} hides a name of the language; choose another", key)
    return loop


def _settings(block: Block) -> Block:
    """Returns ``loop.spec`` over the settings in the loop itself, where older playbooks have them."""
    beside = {key: block[key] for key in (*_SETTINGS, "concurrency") if key in block}
    block.drop(*beside)
    spec = block.child("spec")
    if spec is None:
        return Block(block.reading, beside, block.what, block.place)
    if beside:
        return Block(block.reading, beside | spec.values, spec.what, spec.place)
    return spec


def _check(block: Block, mode: LoopMode | None) -> None:
    has_collection = any(name in block for name in LOOP_IN)
    if "cursor" in block:
        if has_collection:
            block.conflict("a loop takes 'in' or 'cursor', not both", "cursor")
        elif mode is LoopMode.FANOUT:
            block.error("a cursor cannot fan out: its items are not known beforehand", "cursor")
    elif mode is LoopMode.STREAM:
        block.error("mode stream is of steps that an arc on: call.partial leads to", "mode")
    elif mode is LoopMode.CURSOR:
        block.missing("mode cursor needs 'cursor': {kind: postgres, auth, claim: SQL}")
    elif not has_collection:
        block.missing("a loop needs 'in', a list or a template that gives one")


def _check_collection(block: Block, collection: Any) -> None:
    """Refuses a literal that can never give a list; templates are known at run time only."""
    literal = collection
    if isinstance(collection, str):
        if is_template(collection):
            return
        with suppress(ValueError):
            literal = json.loads(collection)
    if collection is not None and not isinstance(literal, (list, dict)):
        key, shape = block.present(*LOOP_IN), described(collection)
        block.error(f'{key} must give a list, found {shape}; a template reads "{{{{ name }}}}"', key)


def _cursor(block: Block) -> CursorSpec | None:
    cursor = block.child("cursor")
    if cursor is None:
        return None
    _check_cursor(cursor)
    return cursor.read(CursorSpec)


def _check_cursor(cursor: Block) -> None:
    kind = cursor.values.get("kind", "postgres")
    if kind not in CURSOR_KINDS:
        cursor.error(f"cursor kind {kind!r} is not supported; use {', '.join(CURSOR_KINDS)}", "kind")
    elif kind != "postgres" and cursor.values.get("release") is not None:
        message = f"release is of kind postgres, which can tell whether a claim was committed; {kind} cannot"
        cursor.error(f"{message}: let the claim take rows whose own lease has expired", "release")
    key = next((name for name in DATABASE_FILE if cursor.values.get(name)), None)
    if kind == "sqlite" and (key is None or cursor.values[key] == ":memory:"):
        cursor.missing("a cursor of kind sqlite needs 'database', its file")
    elif kind in CURSOR_KINDS and kind != "sqlite" and key is not None:
        cursor.error(f"a cursor of kind {kind} has no {key!r}; its credential names the database", key)


def _frame(own: Block) -> FrameSpec | None:
    frame = own.child("frame")
    spec = None if frame is None else frame.read(FrameSpec)
    if frame is None or spec is None or (spec.heartbeat_seconds or 0) < (spec.lease_seconds or math.inf):
        return spec
    reason = "or the lease runs out between two heartbeats; a third of it is usual"
    frame.conflict(f"heartbeat_seconds must be less than lease_seconds, {reason}", "heartbeat_seconds")
    return spec
