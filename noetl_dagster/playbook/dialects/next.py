"""``next`` in all its shapes: a name, a list of names or of ``{step, when}``, ``{spec, arcs}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.policy import read_set
from noetl_dagster.playbook.dialects.spelling import (
    ARC_KEYS,
    ARC_REMEDIES,
    DESCRIPTION,
    INPUT,
    ROUTING_KEYS,
    WHEN,
)
from noetl_dagster.playbook.models import ARC_WORDS, CALL_PARTIAL, Arc, Routing, RoutingMode
from noetl_dagster.playbook.wording import described, suggestion


def read_next(step: Block) -> Routing:
    """The routing of a step."""
    key = step.spelled("next")
    value = None if key is None else step[key]
    if key is None or value is None:
        return Routing()
    if isinstance(value, str):
        return Routing(arcs=(Arc(step=value, place=step.place_of(key)),))
    if isinstance(value, list):
        return _from_list(step, value)
    if isinstance(value, dict):
        block = step.reading.block(step.values, key, f"{step.what}, next")
        assert block is not None
        return _from_router(block) if "step" not in value else Routing(arcs=tuple(_arcs([_arc(block)])))
    step.error(f"next must be a step name, a list or {{spec, arcs}}, found {described(value)}", key)
    return Routing()


def fed_steps(workflow: Any) -> Iterator[str]:
    """Names of the steps that arcs ``on: call.partial`` lead to, from the workflow as it is written."""
    for step in workflow if isinstance(workflow, list) else ():
        value = step.get("next") if isinstance(step, dict) else None
        arcs = value.get("arcs", [value]) if isinstance(value, dict) else value
        for arc in arcs if isinstance(arcs, list) else ():
            if isinstance(arc, dict) and arc.get("on") == CALL_PARTIAL:
                yield str(arc.get("step"))


def _from_router(block: Block) -> Routing:
    spec = block.child("spec")
    mode = block.choice(RoutingMode, "mode")
    if spec is not None:
        mode = spec.choice(RoutingMode, "mode") or mode
        spec.drop("policy")
        spec.close(("mode",), severity="warning")
    arcs = block.items("arcs")
    if "arcs" not in block:
        block.error("a router needs 'arcs', a list of {step, when}", kind=ProblemKind.MISSING_FIELD)
    block.close(ROUTING_KEYS)
    return Routing(mode=mode or RoutingMode.EXCLUSIVE, arcs=tuple(_read_arcs(block, arcs)))


def _from_list(step: Block, entries: list[Any]) -> Routing:
    """The older list. Bare names mean all of them; with conditions it is exclusive, like arcs."""
    arcs = tuple(_read_arcs(step, entries))
    unconditional = len(arcs) > 1 and all(arc.when is None for arc in arcs)
    return Routing(mode=RoutingMode.INCLUSIVE if unconditional else RoutingMode.EXCLUSIVE, arcs=arcs)


def _read_arcs(owner: Block, entries: list[Any]) -> list[Arc]:
    arcs: list[Arc | None] = []
    for index, entry in enumerate(entries):
        place = owner.document.place(entries, index)
        if isinstance(entry, str):
            arcs.append(Arc(step=entry, place=place))
            continue
        block = owner.reading.own_block(entry, f"{owner.what}, arc {index + 1}", place)
        arcs.append(None if block is None else _arc(block))
    return _arcs(arcs)


def _arcs(arcs: list[Arc | None]) -> list[Arc]:
    return [arc for arc in arcs if arc is not None]


def _arc(block: Block) -> Arc | None:
    target = block.text("step")
    when = block.take(*WHEN)
    if isinstance(when, (dict, list)):
        block.error(f"when must be a template or a boolean, found {described(when)}", "when")
        when = None
    targets = read_set(block)
    # values handed to the target directly: it reads them by name, as it reads ctx
    targets |= {f"ctx.{name}": value for name, value in block.mapping(*INPUT).items()}
    on = block.text("on")
    if on is not None and on not in ARC_WORDS:
        block.error(f"no event of a step is called {on!r}; {suggestion(on, ARC_WORDS, 'use one of')}", "on")
    block.drop(*DESCRIPTION, "spec", "name", "label")
    block.close(ARC_KEYS, remedies=ARC_REMEDIES)
    if target is None:
        block.error("an arc needs 'step', the name of the step it leads to", kind=ProblemKind.MISSING_FIELD)
        return None
    return Arc(
        step=target,
        when=when if when is None or isinstance(when, bool) else str(when),
        set=targets,
        on=on,
        place=block.place_of("step"),
    )
