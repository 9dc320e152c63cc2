"""Selects the arcs that fire when a step ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.models import ARC_EVENTS, STEP_FAILED, Arc, RoutingMode
from noetl_dagster.playbook.templates.rendering import Fetch, holds_async, with_references
from noetl_dagster.playbook.templates.scope import CompiledSet, Scope
from noetl_dagster.worker.program import StepProgram


@dataclass(slots=True)
class Routed:
    """Outcome of routing: targets in arc order, the ctx patches of their ``set``, and undefined conditions."""

    fired: list[str] = field(default_factory=list)
    patches: list[tuple[list[str], Any]] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)


async def route(program: StepProgram, scope: Scope, event_name: str, fetch: Fetch) -> Routed:
    """Evaluates the arcs of a step that ended.

    After a failure only an arc with a ``when`` that is true, or one that listens to the failure, may fire.
    An arc whose ``when`` cannot be evaluated, mostly because of an undefined name, does not match and is reported.
    """
    routed = Routed()
    exclusive = program.step.routing.mode is RoutingMode.EXCLUSIVE
    for arc, (when, patches) in zip(program.step.routing.arcs, program.arcs, strict=True):
        if not _may_fire(arc, event_name):
            continue
        try:
            if not await holds_async(when, scope, fetch):
                continue
        except TemplateError as error:
            routed.undefined.append(f"arc to {arc.step}: {error}")
            continue
        routed.fired.append(arc.step)
        await _apply(patches, scope, routed, fetch)
        if exclusive:
            break
    return routed


def _may_fire(arc: Arc, event_name: str) -> bool:
    if arc.on is not None:
        return event_name in ARC_EVENTS.get(arc.on, frozenset({arc.on}))
    return event_name != STEP_FAILED or arc.when is not None


async def _apply(block: CompiledSet, scope: Scope, routed: Routed, fetch: Fetch) -> None:
    if not block:
        return
    for patch in await with_references(lambda: block.patches(scope), fetch):
        if patch.scope == "ctx":
            patch.apply(scope.ctx)
            routed.patches.append((list(patch.path), patch.value))


class EventName(str):
    """The name of an event, equal to each of its spellings: ``step.done`` is ``call.done`` as well."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in ARC_EVENTS.get(other, (other,))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return str.__str__(self)

    __hash__ = str.__hash__


def event_names(name: str, step: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``event`` of arcs' conditions."""
    return {"name": EventName(name), "step": step, "payload": payload}
