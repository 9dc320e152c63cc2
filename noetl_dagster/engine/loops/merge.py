"""What the iterations of a loop wrote to ``ctx``, put together when it ends (DSL section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]


def merge_patches(
    patches: Iterable[tuple[int, Sequence[str], Any]], ctx: Mapping[str, Any]
) -> tuple[dict[Path, Any], list[str]]:
    """Merges the writes of iterations that ran side by side.

    All of them read the same context, so lists that grew from the one they read are put together in item
    order. Of other different values the last item's stands. Within one item its last write counts.

    Args:
        patches: ``(index, path, value)`` in item order.
        ctx: the context that the iterations read.

    Returns:
        The value of each path, and the names that got different values.
    """
    last = {(index, tuple(path)): value for index, path, value in patches}
    written: dict[Path, list[Any]] = {}
    for (_, path), value in last.items():
        written.setdefault(path, []).append(value)
    merged: dict[Path, Any] = {}
    conflicts = []
    for path, values in written.items():
        tails = _tails(_at(ctx, path), values)
        if tails is not None:
            merged[path] = [*_at(ctx, path), *(item for tail in tails for item in tail)]
            continue
        merged[path] = values[-1]
        if any(value != values[-1] for value in values):
            conflicts.append(".".join(path))
    return merged, sorted(conflicts)


def _tails(base: Any, values: list[Any]) -> list[list[Any]] | None:
    """What each value appends to ``base``; None when one of them is no longer list that starts with it."""
    if not isinstance(base, list):
        return None
    grown = [isinstance(value, list) and value[: len(base)] == base for value in values]
    return [value[len(base) :] for value in values] if all(grown) else None


def _at(ctx: Mapping[str, Any], path: Path) -> Any:
    value: Any = ctx
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
