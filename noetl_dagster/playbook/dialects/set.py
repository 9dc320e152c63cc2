"""``set`` blocks under all their spellings: one mapping of target to value."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.spelling import SET_BLOCKS
from noetl_dagster.playbook.templates.assignment import SCOPES, parse_target
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
