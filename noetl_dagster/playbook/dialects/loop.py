"""Loops: both generations of words, with settings from step, loop and ``loop.spec``."""

from __future__ import annotations

import json
import math
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spec import read_fanout
from noetl_dagster.playbook.dialects.spelling import (
    DESCRIPTION,
    LOOP_IN,
    LOOP_ITERATOR,
    LOOP_KEYS,
    LOOP_MODES,
    MAX_IN_FLIGHT,
    RESERVED_ITERATORS,
)
from noetl_dagster.playbook.models import CursorSpec, FrameSpec, Loop, LoopMode
from noetl_dagster.playbook.wording import described

_SETTINGS = (
    "mode",
    "max_in_flight",
    "chunk_size",
    "fail_fast",
    "allow_partial",
    "strict_ctx",
    "frame",
    "policy",
)


def read_loop(block: Block, step_spec: Block, *, step_decides: bool) -> Loop | None:
    """A step's loop.

    Args:
        block: the ``loop`` mapping.
        step_spec: the step's ``spec`` over the executor's; ``loop_mode: fanout`` stands there.
        step_decides: whether ``loop_mode`` is the step's own and not the executor's.
    """
    own = _settings(block)
    collection = block.take(*LOOP_IN)
    iterator = block.text(*LOOP_ITERATOR)
    cursor = _cursor(block)
    mode = _mode(block, own, step_spec, step_decides=step_decides)
    loop = block.build(
        Loop,
        collection=collection,
        iterator=iterator,
        mode=LoopMode.CURSOR if cursor is not None else mode,
        max_in_flight=own.whole(*MAX_IN_FLIGHT),
        chunk_size=own.whole("chunk_size"),
        cursor=cursor,
        frame=_frame(own),
        fail_fast=_flag(own, step_spec, "fail_fast"),
        allow_partial=_flag(own, step_spec, "allow_partial"),
        strict_ctx=_flag(own, step_spec, "strict_ctx"),
        fanout=read_fanout(step_spec),
    )
    own.drop(*_SETTINGS)
    own.close(_SETTINGS, severity="warning")
    block.drop(*DESCRIPTION)
    block.close(LOOP_KEYS)
    _check(block, cursor, mode)
    _check_collection(block, collection)
    _check_iterator(block, iterator)
    return loop


FED = Loop(iterator="chunk", mode=LoopMode.STREAM, max_in_flight=1)
"""The loop of a step that takes the chunks of another one and says nothing else: one after another."""


def check_fed_spec(spec: Block) -> None:
    """Points out what a step's spec says to a loop over chunks, which has a spec of its own."""
    for name in ("allow_partial", "fail_fast", *MAX_IN_FLIGHT):
        if name in spec:
            spec.error(
                f"{name} has no effect on a step that takes chunks; write loop: {{spec: {{{name}: ...}}}}",
                name,
                ProblemKind.MISPLACED_FIELD,
            )


def read_fed_loop(block: Block) -> Loop | None:
    """The loop of a step that takes the chunks of another one: what a chunk is called, and how many at a time."""
    own = _settings(block)
    if any(name in block for name in (*LOOP_IN, "cursor")):
        block.error(
            "an arc on: call.partial feeds the step chunk by chunk, and it cannot go through something else as well; "
            "leave out 'in', or loop over the rows of a chunk in a child playbook",
            kind=ProblemKind.CONFLICTING_FIELDS,
        )
    mode = own.choice(LoopMode, "mode", also=LOOP_MODES)
    if mode not in (None, LoopMode.STREAM):
        own.error(
            "an arc on: call.partial feeds the step; leave out the mode, or say the arc on: step.done",
            "mode",
            ProblemKind.CONFLICTING_FIELDS,
        )
    iterator = block.text(*LOOP_ITERATOR)
    loop = block.build(
        Loop,
        iterator=iterator or FED.iterator,
        mode=LoopMode.STREAM,
        max_in_flight=_width(own),
        fail_fast=own.flag("fail_fast"),
        allow_partial=own.flag("allow_partial"),
        strict_ctx=own.flag("strict_ctx"),
    )
    own.drop(*_SETTINGS)
    own.close(_SETTINGS, severity="warning")
    block.drop(*DESCRIPTION, *LOOP_IN, "cursor")
    block.close(LOOP_KEYS)
    _check_iterator(block, iterator)
    return loop


def _width(own: Block) -> int:
    """Chunks that are taken at a time; an execution that began with none takes one after another."""
    width = own.whole(*MAX_IN_FLIGHT)
    if width is not None and width < 1:
        key = next(name for name in MAX_IN_FLIGHT if name in own)
        own.error(f"{key} must be 1 or more, found {width}", key)
        width = None
    return width or FED.max_in_flight


def _settings(block: Block) -> Block:
    """``loop.spec``, over the same settings written in the loop itself, as the seeds do."""
    beside = {key: block[key] for key in (*_SETTINGS, "concurrency") if key in block}
    block.drop(*beside)
    spec = block.child("spec")
    if spec is None:
        return Block(block.reading, beside, block.what, block.place)
    if beside:
        return Block(block.reading, beside | spec.values, spec.what, spec.place)
    return spec


def _mode(block: Block, own: Block, step_spec: Block, *, step_decides: bool) -> LoopMode | None:
    """``loop_mode`` of the step, else the loop's own mode, else ``loop_mode`` of the executor."""
    outer = step_spec.choice(LoopMode, "loop_mode", also=LOOP_MODES)
    inner = own.choice(LoopMode, "mode", also=LOOP_MODES)
    return outer or inner if step_decides else inner or outer


def _check(block: Block, cursor: CursorSpec | None, mode: LoopMode | None) -> None:
    has_collection = any(name in block for name in LOOP_IN)
    if "cursor" in block:
        if has_collection:
            block.error("a loop takes 'in' or 'cursor', not both", "cursor", ProblemKind.CONFLICTING_FIELDS)
        elif mode is LoopMode.FANOUT:
            block.error("a cursor cannot fan out: its items are not known beforehand", "cursor")
    elif mode is LoopMode.STREAM:
        block.error("mode stream is of steps that an arc on: call.partial leads to", "mode")
    elif mode is LoopMode.CURSOR:
        message = "mode cursor needs 'cursor': {kind: postgres, auth, claim: SQL}"
        block.error(message, kind=ProblemKind.MISSING_FIELD)
    elif not has_collection:
        block.error("a loop needs 'in', a list or a template that gives one", kind=ProblemKind.MISSING_FIELD)


def _check_collection(block: Block, collection: Any) -> None:
    """A literal that can never give a list is refused at once; templates are known at run time only."""
    if collection is None or isinstance(collection, (list, dict)):
        return
    if isinstance(collection, str):
        if "{{" in collection or "{%" in collection:
            return
        try:
            if isinstance(json.loads(collection), (list, dict)):
                return
        except ValueError:
            pass
    key = next(name for name in LOOP_IN if name in block)
    block.error(
        f'{key} must give a list, found {described(collection)}; a template reads "{{{{ name }}}}"', key
    )


def _check_iterator(block: Block, iterator: str | None) -> None:
    key = block.present(*LOOP_ITERATOR)
    if iterator is None or key is None:
        return
    if not iterator.isidentifier():
        block.error(f"{key} {iterator!r} cannot be a name in templates; use letters, digits and _", key)
    elif iterator in RESERVED_ITERATORS:
        block.warn(f"{key} {iterator!r} hides a name of the language; choose another", key)


def _cursor(block: Block) -> CursorSpec | None:
    cursor = block.child("cursor")
    if cursor is None:
        return None
    if cursor.values.get("kind") not in (None, "postgres"):
        cursor.error(f"cursor kind {cursor['kind']!r} is not supported; use postgres", "kind")
    fields = cursor.fields(CursorSpec)
    cursor.close(CursorSpec.model_fields, severity=CursorSpec.unknown_keys)
    if fields["claim"] is None:
        message = "a cursor needs 'claim', SQL that claims work and returns rows"
        cursor.error(message, kind=ProblemKind.MISSING_FIELD)
        return None
    return cursor.build(CursorSpec, **fields)


def _frame(own: Block) -> FrameSpec | None:
    frame = own.child("frame")
    if frame is None:
        return None
    spec = frame.read(FrameSpec)
    if spec is not None and (spec.heartbeat_seconds or 0) >= (spec.lease_seconds or math.inf):
        frame.error(
            "heartbeat_seconds must be less than lease_seconds, or the lease runs out between two heartbeats; "
            "a third of it is usual",
            "heartbeat_seconds",
            ProblemKind.CONFLICTING_FIELDS,
        )
    return spec


def _flag(own: Block, step_spec: Block, name: str) -> bool:
    return own.flag(name) if name in own else step_spec.flag(name)
