"""Evaluates common expressions without code that Jinja generates.

Paths, comparisons, ``and``, ``or``, ``not``, ``+``, ``-`` and lists become closures of the operations that Jinja would
generate. They need no context per evaluation, which takes half the time of a short condition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import nodes

from noetl_dagster.playbook.templates.reading import ENVIRONMENT

Evaluate = Callable[[Mapping[str, Any]], Any]

MOST_NODES = 32
"""Nodes below that of the whole expression, at most. So it has up to 16 operators and needs no budget, as in generated
code."""

_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}
_COMPUTED: dict[type[nodes.Expr], Callable[[Any, Any], Any]] = {nodes.Add: operator.add, nodes.Sub: operator.sub}


class _NeedsCodeError(Exception):
    """An expression has a part for which Jinja has to generate code."""


def direct(expression: nodes.Node) -> Evaluate | None:
    """Returns a function of the scope, or None if the expression needs generated code."""
    if sum(1 for _ in expression.find_all(nodes.Node)) > MOST_NODES:
        return None
    try:
        return _direct(expression)
    except _NeedsCodeError:
        return None


def path(root: str, keys: Sequence[str]) -> Evaluate:
    """Returns the function of ``root.key.key``."""
    known, undefined, attribute = ENVIRONMENT.globals, ENVIRONMENT.undefined, ENVIRONMENT.getattr

    def evaluate(scope: Mapping[str, Any]) -> Any:
        try:
            value = scope[root]
        except KeyError:
            value = known[root] if root in known else undefined(name=root)
        for key in keys:
            value = value[key] if value.__class__ is dict and key in value else attribute(value, key)
        return value

    return evaluate


def _direct(node: nodes.Node) -> Evaluate:
    match node:
        case nodes.Const(value=value):
            return lambda scope: value
        case nodes.Name(name=name):
            return path(name, ())
        case nodes.Getattr():
            return _attributes(node)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=key)):
            of, getitem = _direct(inner), ENVIRONMENT.getitem
            return lambda scope: getitem(of(scope), key)
        case nodes.Not(node=inner):
            of = _direct(inner)
            return lambda scope: not of(scope)
        case nodes.And(left=left, right=right):
            first, second = _direct(left), _direct(right)
            return lambda scope: first(scope) and second(scope)
        case nodes.Or(left=left, right=right):
            first, second = _direct(left), _direct(right)
            return lambda scope: first(scope) or second(scope)
        case nodes.Compare(expr=left, ops=[nodes.Operand(op=name, expr=right)]):
            return _of_both(_COMPARED[name], left, right)
        case nodes.Add(left=left, right=right) | nodes.Sub(left=left, right=right):
            return _of_both(_COMPUTED[type(node)], left, right)
        case nodes.List(items=items):
            parts = [_direct(item) for item in items]
            return lambda scope: [one(scope) for one in parts]
    raise _NeedsCodeError


def _attributes(node: nodes.Node) -> Evaluate:
    """Returns the function of a chain of attributes."""
    keys: list[str] = []
    while isinstance(node, nodes.Getattr):
        keys.insert(0, node.attr)
        node = node.node
    if isinstance(node, nodes.Name):
        return path(node.name, keys)
    of, attribute = _direct(node), ENVIRONMENT.getattr

    def evaluate(scope: Mapping[str, Any]) -> Any:
        value = of(scope)
        for key in keys:
            value = attribute(value, key)
        return value

    return evaluate


def _of_both(compute: Callable[[Any, Any], Any], left: nodes.Node, right: nodes.Node) -> Evaluate:
    first, second = _direct(left), _direct(right)
    return lambda scope: compute(first(scope), second(scope))
