"""Reads task policies and ``set`` blocks."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind, TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spelling import (
    DESCRIPTION,
    RULE_KEYS,
    SET_BLOCKS,
    WHEN,
)
from noetl_dagster.playbook.models import Directive, PolicyAction, PolicyRule
from noetl_dagster.playbook.templates.scope import SCOPES, parse_target
from noetl_dagster.playbook.wording import described


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
