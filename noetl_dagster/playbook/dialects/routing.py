"""Reads what decides about the next task or step: ``set`` blocks, task policies and ``next``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from noetl_dagster.errors import ProblemKind, TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spelling import (
    ARC_KEYS,
    ARC_REMEDIES,
    DESCRIPTION,
    INPUT,
    ROUTING_KEYS,
    RULE_KEYS,
    SET_BLOCKS,
    WHEN,
)
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
from noetl_dagster.playbook.templates.scope import SCOPES, parse_target
from noetl_dagster.playbook.wording import described, suggestion


def read_set(block: Block) -> dict[str, Any]:
    """Targets and values of ``set``, ``set_ctx``, ``set_iter`` and ``vars``, as ``{"ctx.x": value}``.

    Bare names of ``set`` stay bare: what they mean depends on whether the step loops.
    """
    targets: dict[str, Any] = {}
    for key, scope in SET_BLOCKS.items():
        if block.spelled(key) is None or block[key] is None:
            continue
        if not isinstance(block[key], dict):
            block.error(f"{key} must be a mapping of name to value, found {described(block[key])}", key)
            continue
        for name, value in _flat(block[key], scope):
            _check_target(block, key, name)
            targets[name] = value
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


def _check_target(block: Block, key: str, name: str) -> None:
    try:
        parse_target(name, in_loop=False)
    except TemplateError as error:
        block.error(str(error), key)


_RESERVED = (
    "mode",
    "on_unmatched",
    "before",
    "after",
    "finally",
    "admit",
    "lifecycle",
    "failure",
    "emit",
    "exec",
    "results",
    "defaults",
    "limits",
)
"""Words that the published specification reserves inside a policy."""


def read_rules(spec: Block) -> tuple[PolicyRule, ...] | None:
    """The rules of a spec's ``policy``; None when it has none."""
    key = spec.spelled("policy")
    if key is None or spec[key] is None:
        return None
    if isinstance(spec[key], list):
        return _rules(spec, key)
    policy = spec.reading.block(spec.values, key, f"{spec.what}, policy")
    if policy is None:
        return None
    policy.drop(*_RESERVED)
    key = policy.spelled("rules")
    policy.close(("rules", *_RESERVED), severity="warning")
    if key is None:
        if not policy.values:
            message = "a policy needs rules: [{when, then}, {else: {then}}]"
            policy.error(message, kind=ProblemKind.MISSING_FIELD)
        elif not set(policy.values) & set(_RESERVED):
            message = "a policy needs 'rules', a list of {when, then} and one {else: {then}}"
            policy.error(message, kind=ProblemKind.MISSING_FIELD)
        return None
    return _rules(policy, key)


def _rules(owner: Block, key: str) -> tuple[PolicyRule, ...]:
    if not isinstance(owner[key], list):
        owner.error(f"{key} must be a list of {{when, then}}, found {described(owner[key])}", key)
        return ()
    rules: list[PolicyRule] = []
    otherwise: list[PolicyRule] = []
    for index, _ in enumerate(owner[key]):
        block = owner.reading.block(owner[key], index, f"{owner.what}, rule {index + 1}")
        rule = None if block is None else _rule(block)
        if rule is None or block is None:
            continue
        (otherwise if rule.when is None else rules).append(rule)
        if len(otherwise) > 1:
            block.error("a policy has one else rule; this is the second")
    return (*rules, *otherwise[:1])


def _rule(block: Block) -> PolicyRule | None:
    otherwise = block.spelled("else")
    when = block.take(*WHEN)
    if otherwise is not None:
        return _else_rule(block, when)
    block.drop(*DESCRIPTION, "name")
    if when is None:
        block.error(
            "a rule needs 'when' and 'then', or is {else: {then: ...}}", kind=ProblemKind.MISSING_FIELD
        )
        block.drop("then")
        block.close(RULE_KEYS)
        return None
    if isinstance(when, (dict, list)):
        block.error(f"when must be a template or a boolean, found {described(when)}", "when")
        return None
    action = block.child("then")
    if action is None and "then" not in block:
        message = "a rule needs 'then', for example then: {do: retry, attempts: 3}"
        block.error(message, kind=ProblemKind.MISSING_FIELD)
    block.close(RULE_KEYS)
    then = None if action is None else _action(action)
    if then is None:
        return None
    return PolicyRule(when=when if isinstance(when, bool) else str(when), then=then)


def _else_rule(block: Block, when: Any) -> PolicyRule | None:
    """``{else: {then: {do}}}``, ``{else: {do}}``."""
    if when is not None:
        block.error("'when' and 'else' exclude each other", "when", ProblemKind.CONFLICTING_FIELDS)
    block.drop("then", *DESCRIPTION, "name")
    block.close(RULE_KEYS)
    if block["else"] is None and isinstance(block.values.get("then"), dict):
        action = block.child("then")
    else:
        action = block.reading.block(block.values, "else", f"{block.what}, else")
    if action is not None and "then" in action:
        inner = action.child("then")
        action.close(("then",))
        action = inner
    then = None if action is None else _action(action)
    return None if then is None else PolicyRule(when=None, then=then)


def _action(block: Block) -> PolicyAction | None:
    block.drop(*DESCRIPTION, "reason", "message")
    action = block.read(PolicyAction, set=read_set(block))
    if action is not None and action.do is Directive.JUMP:
        if action.to is None:
            block.error("jump needs 'to', the name of a task of this step", kind=ProblemKind.MISSING_FIELD)
        else:
            block.reading.jumps.append((action.to, block))
    return action


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
