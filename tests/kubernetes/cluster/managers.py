"""Who has set which field of an object: what server-side apply refuses to change for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.patches import identity_of
from tests.kubernetes.cluster.store import Key, Object

Place = tuple[str, ...]
"""The way to a field; items of lists that are merged stand by what tells them apart."""

_NOBODYS = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}


class Managers:
    """The managers of fields. The last that has set a field has it; appliers of the same value share it."""

    def __init__(self) -> None:
        self._owners: dict[Key, dict[Place, set[str]]] = {}

    def of(self, key: Key, place: Place) -> set[str]:
        """The managers of a field."""
        return self._owners.get(key, {}).get(place, set())

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._owners.pop(key, None)

    def updated(self, key: Key, old: Object, new: Object, manager: str) -> None:
        """A request other than apply has changed an object: its manager has what is different."""
        before, owners = dict(fields(old)), self._owners.setdefault(key, {})
        for place, value in fields(new):
            if before.get(place) != value:
                owners[place] = {manager}

    def apply(self, key: Key, old: Object, given: Object, manager: str, *, force: bool) -> None:
        """A manager applies: it has the fields that it states.

        Raises:
            Refused: 409, where a field would change that another has, unless by force.
        """
        now, owners = dict(fields(old)), self._owners.setdefault(key, {})
        stated = dict(fields(given))
        conflicts: dict[str, list[str]] = {}
        for place, value in stated.items():
            for other in owners.get(place, set()) - {manager}:
                if now.get(place) != value:
                    conflicts.setdefault(other, []).append(f".{'.'.join(place)}")
        if conflicts and not force:
            raise _conflict(conflicts)
        for place, value in stated.items():
            shared = owners.get(place, set()) if now.get(place) == value else set()
            owners[place] = shared | {manager}
        for place in owners.keys() - stated.keys():
            owners[place].discard(manager)


def fields(found: Any, way: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The fields that managers have: leaves, and lists that are replaced as a whole; no status."""
    if way[:1] in {("status",)} or way[:2] in {("metadata", "managedFields"), ("metadata", "resourceVersion")}:
        return
    if isinstance(found, dict) and found:
        for name, below in found.items():
            yield from fields(below, (*way, name))
    elif isinstance(found, list) and way and (names := identity_of(way[-1], found)):
        for name, item in zip(names, found, strict=True):
            yield from fields(item, (*way, name))
    elif way not in _NOBODYS:
        yield way, found


def _conflict(conflicts: dict[str, list[str]]) -> Refused:
    count = sum(map(len, conflicts.values()))
    said = "; ".join(
        f'conflicts with "{manager}": {", ".join(sorted(places))}' for manager, places in conflicts.items()
    )
    return Refused(409, "Conflict", f"Apply failed with {count} conflict{'s' if count > 1 else ''}: {said}")
