"""Reads what decides about the next task or step: ``set`` blocks, task policies and ``next``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.models import (
    ARC_WORDS,
    CALL_PARTIAL,
    Arc,
    Directive,
    PolicyAction,
    PolicyRule,
    Routing,
    RoutingMode,
)
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.scope import SCOPES, parse_target
from noetl_dagster.playbook.tool_kinds import DESCRIPTION, INPUT, SET_BLOCKS, WHEN
from noetl_dagster.playbook.wording import described, suggestion

_ARC_REMEDIES = {
    "then": "an arc names its target: {step: name, when: ...}",
    "else": "an arc without 'when' is the default",
}
_ON_ERROR = "{{ error is defined }}"
_RESERVED = (
    *("mode", "on_unmatched", "before", "after", "finally", "admit", "lifecycle"),
    *("failure", "emit", "exec", "results", "defaults", "limits"),
)
"""Words that the published specification reserves inside a policy."""


def read_set(block: Block) -> dict[str, Any]:
    """Targets and values of ``set``, ``set_ctx``, ``set_iter`` and ``vars``, as ``{"ctx.x": value}``.

    Bare names of ``set`` stay bare: what they mean depends on whether the step loops.
    """
    targets: dict[str, Any] = {}
    for key, scope in SET_BLOCKS.items():
        value = block.take(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            block.error(f"{key} must be a mapping of name to value, found {described(value)}", key)
            continue
        for name, item in _flat(value, scope):
            try:
                parse_target(name, in_loop=False)
            except TemplateError as error:
                block.error(str(error), key)
            with suppress(TemplateError):  # reported with every other template that does not parse
                if "keychain" in compile_value(item).names:
                    message = f"set {name}: a value of the keychain would be stored in the event log"
                    block.error(f"{message}; use it in the fields of tools only", key)
            targets[name] = item
    return targets


def _flat(values: dict[str, Any], scope: str | None) -> list[tuple[str, Any]]:
    """Prefixes bare names with ``scope`` and opens ``{ctx: {a: 1}}`` to ``ctx.a``."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name in SCOPES and isinstance(value, dict):
            flat += [(f"{name}.{inner}", item) for inner, item in value.items()]
        elif scope is None or (name.partition(".")[0] in SCOPES and "." in name):
            flat.append((name, value))
        else:
            flat.append((f"{scope}.{name}", value))
    return flat


def read_rules(spec: Block) -> tuple[PolicyRule, ...] | None:
    """Reads the rules of a spec's ``policy``; returns None if it has none."""
    value = spec.take("policy")
    if isinstance(value, list):
        return _rules(spec, "policy")
    policy = spec.child("policy")
    if policy is None:
        return None
    policy.drop("rules", *_RESERVED)
    policy.close(("rules", *_RESERVED))
    if "rules" in policy:
        return _rules(policy, "rules")
    if not policy.values:
        policy.missing("a policy needs rules: [{when, then}, {else: {then}}]")
    elif policy.values.keys().isdisjoint(_RESERVED):
        policy.missing("a policy needs 'rules', a list of {when, then} and one {else: {then}}")
    return None


def _rules(owner: Block, key: str) -> tuple[PolicyRule, ...]:
    if not isinstance(owner[key], list):
        owner.error(f"{key} must be a list of {{when, then}}, found {described(owner[key])}", key)
        return ()
    rules: list[PolicyRule] = []
    otherwise: list[PolicyRule] = []
    for block in owner.blocks(key, f"{owner.what}, rule"):
        rule = _rule(block)
        if rule is None:
            continue
        (otherwise if rule.when is None else rules).append(rule)
        if len(otherwise) > 1:
            block.error("a policy has one else rule; this is the second")
    return (*rules, *otherwise[:1])


def _rule(block: Block) -> PolicyRule | None:
    written = block.present(*WHEN)
    when = block.condition(*WHEN)
    block.spelled("then")
    block.spelled("else")
    block.drop(*DESCRIPTION, "name")
    block.close()
    if "else" in block:
        return _else_rule(block, when)
    if when is None:
        block.missing("a rule needs 'when' and 'then', or is {else: {then: ...}}")
        return None
    action = block.child("then")
    if action is None and "then" not in block:
        block.missing("a rule needs 'then', for example then: {do: retry, attempts: 3}")
    then = None if action is None else _action(action)
    place = block.place if written is None else block.place_of(written)
    return None if then is None else PolicyRule(when=when, then=then, place=place)


def _else_rule(block: Block, when: str | bool | None) -> PolicyRule | None:
    """Reads ``{else: {then: {do}}}`` or ``{else: {do}}``."""
    if when is not None:
        block.conflict("'when' and 'else' exclude each other", "when")
    if block["else"] is None and isinstance(block.values.get("then"), dict):
        action = block.child("then")
    else:
        action = block.reading.block(block["else"], f"{block.what}, else", block.place_of("else"))
    if action is not None and "then" in action:
        inner = action.child("then")
        action.close()
        action = inner
    then = None if action is None else _action(action)
    return None if then is None else PolicyRule(when=None, then=then, place=block.place_of("else"))


def read_on_error(spec: Block) -> tuple[PolicyRule, ...]:
    """Reads ``on_error``: what follows an error that no rule decides about, ``continue`` or ``{do: retry, ...}``."""
    action: Block | None
    place = spec.place_of("on_error")
    if isinstance(spec.values.get("on_error"), str):
        values = spec.document.gathered([(spec.values, "on_error", "do")])
        action = Block(spec.reading, values, f"{spec.what}, on_error", place)
        spec.drop("on_error")
    else:
        action = spec.child("on_error", expected="on_error must be a word such as continue, or {do: retry, ...}")
    then = None if action is None else _action(action)
    return () if then is None else (PolicyRule(when=_ON_ERROR, then=then, place=place),)


def _action(block: Block) -> PolicyAction | None:
    block = block.with_constant_delay()
    block.drop(*DESCRIPTION, "reason", "message")
    action = block.read(PolicyAction, set=read_set(block))
    if action is not None and action.do is Directive.JUMP:
        if action.to is None:
            block.missing("jump needs 'to', the name of a task of this step")
        else:
            block.reading.jumps.append((action.to, block))
    return action


def read_next(step: Block) -> Routing:
    """Reads the routing of a step."""
    value = step.take("next")
    if isinstance(value, str):
        return Routing(arcs=(Arc(step=value, place=step.place_of("next")),))
    if isinstance(value, list):  # bare names mean all of them; with conditions it is exclusive, like arcs
        arcs = _read_arcs(step, value)
        unconditional = len(arcs) > 1 and all(arc.when is None for arc in arcs)
        return Routing(mode=RoutingMode.INCLUSIVE if unconditional else RoutingMode.EXCLUSIVE, arcs=arcs)
    if isinstance(value, dict):
        block = step.child("next")
        assert block is not None
        if "step" not in value:
            return _from_router(block)
        arc = _arc(block)
        return Routing(arcs=() if arc is None else (arc,))
    if value is not None:
        message = f"next must be a step name, a list or {{spec, arcs}}, found {described(value)}"
        step.error(message, "next")
    return Routing()


def streaming_arcs(step: Any) -> Iterator[dict[str, Any]]:
    """Yields the arcs ``on: call.partial`` of a step as it is written."""
    value = step.get("next") if isinstance(step, dict) else None
    arcs = value.get("arcs", [value]) if isinstance(value, dict) else value
    for arc in arcs if isinstance(arcs, list) else ():
        if isinstance(arc, dict) and arc.get("on") == CALL_PARTIAL:
            yield arc


def _from_router(block: Block) -> Routing:
    spec = block.child("spec")
    mode = block.choice(RoutingMode, "mode")
    if spec is not None:
        mode = spec.choice(RoutingMode, "mode") or mode
        spec.drop("policy")
        spec.close()
    if "arcs" not in block:
        block.missing("a router needs 'arcs', a list of {step, when}")
    arcs = _read_arcs(block, block.items("arcs"))
    block.close()
    return Routing(mode=mode or RoutingMode.EXCLUSIVE, arcs=arcs)


def _read_arcs(owner: Block, entries: list[Any]) -> tuple[Arc, ...]:
    arcs: list[Arc | None] = []
    for index, entry in enumerate(entries):
        place = owner.document.place(entries, index)
        if isinstance(entry, str):
            arcs.append(Arc(step=entry, place=place))
            continue
        block = owner.reading.block(entry, f"{owner.what}, arc {index + 1}", place)
        arcs.append(None if block is None else _arc(block))
    return tuple(arc for arc in arcs if arc is not None)


def _arc(block: Block) -> Arc | None:
    target = block.text("step")
    when = block.condition(*WHEN)
    # values handed to the target directly: it reads them by name, as it reads ctx
    handed = {f"ctx.{name}": value for name, value in block.mapping(*INPUT).items()}
    on = block.text("on")
    if on is not None and on not in ARC_WORDS:
        block.error(f"no event of a step is called {on!r}; {suggestion(on, ARC_WORDS, 'use one of')}", "on")
    targets = read_set(block) | handed
    block.drop(*DESCRIPTION, "spec", "name", "label")
    block.close(remedies=_ARC_REMEDIES)
    if target is None:
        block.missing("an arc needs 'step', the name of the step it leads to")
        return None
    return Arc(step=target, when=when, set=targets, on=on, place=block.place_of("step"))
