"""``set`` blocks: where their values go, and the patches that an event carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.rendering import Compiled, compile_value

SCOPES = ("ctx", "iter", "step")
Stored = Callable[[str, tuple[str, ...]], Any]
"""What ``set`` has written to a scope and path; None where there is nothing."""

READ_ONLY_SCOPES = frozenset({"workload", "keychain", "input", "loop", "event", "output", "results", "job"})


@dataclass(frozen=True, slots=True)
class Patch:
    """One value that ``set`` wrote: ``scope`` is ctx, iter or step; ``path`` the keys below it."""

    scope: str
    path: tuple[str, ...]
    value: Any

    def apply(self, target: dict[str, Any]) -> None:
        """Writes into ``target``; mappings on the way are copied, since they may belong to a result."""
        *parents, last = self.path
        for key in parents:
            inner = target.get(key)
            target[key] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[key]
        target[last] = self.value

    def as_json(self) -> dict[str, Any]:
        return {"scope": self.scope, "path": list(self.path), "value": self.value}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Patch:
        return cls(written["scope"], tuple(written["path"]), written["value"])


def parse_target(name: str, *, in_loop: bool) -> tuple[str, tuple[str, ...]]:
    """Splits ``ctx.a.b`` into scope and path. A bare name is ``ctx`` outside loops and ``iter`` inside.

    Raises:
        TemplateError: the target is read-only or empty.
    """
    parts = tuple(name.split("."))
    if not all(parts):
        raise TemplateError(f"set: {name!r} is not a target; write ctx.name, iter.name or step.name")
    if len(parts) > 1 and parts[0] in SCOPES:
        return parts[0], parts[1:]
    if parts[0] in READ_ONLY_SCOPES and len(parts) > 1:
        raise TemplateError(
            f"set: {parts[0]} is read-only; write ctx.{'.'.join(parts[1:])} instead of {name}"
        )
    return ("iter" if in_loop else "ctx"), parts


def _nothing_stored(scope: str, path: tuple[str, ...]) -> Any:
    return None


class CompiledSet:
    """A ``set`` block ready to be rendered."""

    __slots__ = ("_entries", "names")

    def __init__(self, entries: tuple[tuple[str, tuple[str, ...], Compiled], ...]) -> None:
        self._entries = entries
        self.names: frozenset[str] = frozenset().union(*(value.names for _, _, value in entries))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def patches(self, scope: Mapping[str, Any], stored: Stored = _nothing_stored) -> list[Patch]:
        """Renders every value in the same scope: one entry does not see what another writes.

        Args:
            stored: what stands at a target now; a value that grew from it shares its parts.

        Raises:
            TemplateError: a value cannot be rendered.
            ReferenceNeeded: a stored result has to be fetched first.
        """
        return [
            Patch(target, path, value.render_over(scope, stored(target, path)))
            for target, path, value in self._entries
        ]


def compile_set(block: Mapping[str, Any], *, in_loop: bool) -> CompiledSet:
    """Compiles a ``set`` block.

    Raises:
        TemplateError: a target is read-only, or a template does not parse.
    """
    return CompiledSet(
        tuple((*parse_target(name, in_loop=in_loop), compile_value(value)) for name, value in block.items())
    )
