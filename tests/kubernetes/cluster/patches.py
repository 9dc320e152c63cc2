"""Patches of objects: strategic merges, which appliers make too."""

from __future__ import annotations

import copy
from typing import Any

STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "ports": ("containerPort", "port"),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
}
"""Lists that are merged item by item, and what tells their items apart; other lists are replaced."""


def merged_strategically(old: Any, patch: Any) -> Any:
    """Merges mappings key by key, and lists of named items item by item."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    result = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):  # $setElementOrder, $retainKeys: order is nothing that is relied on here
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and _identity(key, value):
            result[key] = _merged_items(result.get(key) or [], value, _MERGE_KEYS[key])
        else:
            result[key] = merged_strategically(result.get(key), value)
    return result


def without_given_up(old: Any, before: Any, now: Any) -> Any:
    """An object without what a manager applied before and applies no longer."""
    if not (isinstance(old, dict) and isinstance(before, dict) and isinstance(now, dict)):
        return old
    result = dict(old)
    for key, value in before.items():
        if key not in now:
            result.pop(key, None)
        elif key in result and isinstance(value, list) and _identity(key, value):
            kept = {_name(item, _MERGE_KEYS[key]) for item in now[key] or ()}
            given = {_name(item, _MERGE_KEYS[key]) for item in value}
            result[key] = [
                item for item in result[key] if (name := _name(item, _MERGE_KEYS[key])) in kept or name not in given
            ]
        elif key in result:
            result[key] = without_given_up(result[key], value, now[key])
    return result


def _identity(key: str, items: list[Any]) -> bool:
    return key in _MERGE_KEYS and all(
        isinstance(item, dict) and _name(item, _MERGE_KEYS[key]) is not None for item in items
    )


def _name(item: Any, keys: tuple[str, ...]) -> Any:
    found = tuple(item[key] for key in keys if key in item)
    return found or None


def _merged_items(old: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    result = copy.deepcopy(old)
    for item in patch:
        index = next((i for i, known in enumerate(result) if _name(known, keys) == _name(item, keys)), None)
        if item.get("$patch") == "delete":
            if index is not None:
                result.pop(index)
        elif index is None:
            result.append(copy.deepcopy(item))
        else:
            result[index] = merged_strategically(result[index], item)
    return result
