"""Columns that rows have and their table lacks: refused, left out, or added with the type that their values show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from noetl_dagster.errors import ToolError


class OnDrift(StrEnum):
    """The treatment of a column that the target lacks; ``fail`` is another word for ``error``."""

    ERROR = "error"
    IGNORE = "ignore"
    ADD = "add"

    @classmethod
    def _missing_(cls, value: object) -> OnDrift | None:
        return cls.ERROR if value == "fail" else None


class Drift:
    """Applies :class:`OnDrift` to columns that the target lacks.

    Args:
        target: for errors.
        remedy: what to write instead, for errors.

    Attributes:
        columns: those of the target; None: those of the first chunk.
        added: new columns with their types.
        ignored: columns that are left out.
    """

    def __init__(
        self,
        on_drift: OnDrift,
        target: str,
        columns: Iterable[str] | None = None,
        *,
        remedy: str = "on_drift: add or ignore, or name the columns to read",
    ) -> None:
        self._on_drift, self._target, self._remedy = on_drift, target, remedy
        self.columns = None if columns is None else list(columns)
        self.added: dict[str, str] = {}
        self.ignored: list[str] = []

    def sort(self, columns: Sequence[str], type_of: Callable[[str], str]) -> tuple[list[str], dict[str, str]]:
        """Returns the columns to write, and the types of those that the target does not have yet.

        Raises ``ToolError`` if the target lacks columns, and none are to be added or ignored.
        """
        existing = self.columns = list(columns) if self.columns is None else self.columns
        new = [name for name in columns if name not in existing]
        if new and self._on_drift is OnDrift.ERROR:
            raise ToolError(
                f"{self._target} has no column {', '.join(map(str, new))}; its columns: {', '.join(existing)}. Write "
                f"{self._remedy}",
                kind="schema",
                code="42703",
            )
        if self._on_drift is OnDrift.IGNORE:
            self.ignored += [name for name in new if name not in self.ignored]
            return [name for name in columns if name not in new], {}
        types = {name: type_of(name) for name in new}
        existing += new
        self.added |= types
        return list(columns), types

    def report(self) -> dict[str, list[str]]:
        """Returns the added and ignored columns for the result, if there are any."""
        named = {"added": list(self.added), "ignored": self.ignored}
        return {word: names for word, names in named.items() if names}


def drift_of_sink(on_new_column: str | None, target: str, columns: Iterable[str]) -> Drift:
    """Returns what applies ``on_new_column`` of a sink, by default ``fail``; raises ``ToolError`` for another word."""
    try:
        on_drift = OnDrift(str(on_new_column or OnDrift.ERROR).strip().lower())
    except ValueError:
        raise ToolError(
            f"on_new_column: {on_new_column!r} is unknown; write add, ignore or fail", kind="schema"
        ) from None
    remedy = "on_new_column: add or ignore, or name the columns to write with 'args'"
    return Drift(on_drift, target, columns, remedy=remedy)


def kind_of_value(value: Any) -> str:
    """Returns the kind of a value that is not null, for :func:`type_of_kinds`."""
    name = type(value).__name__
    return "Decimal" if name == "int" and not -(1 << 63) <= value < 1 << 63 else name


def type_of_kinds(kinds: Iterable[str]) -> str:
    """Returns the PostgreSQL type of a column whose values are of these kinds."""
    return _TYPES_OF_VALUES.get(frozenset(kinds), "text")


_TYPES_OF_VALUES: Mapping[frozenset[str], str] = {
    frozenset({"bool"}): "boolean",
    frozenset({"int"}): "bigint",
    frozenset({"float"}): "double precision",
    frozenset({"int", "float"}): "double precision",
    frozenset({"Decimal"}): "numeric",
    frozenset({"int", "Decimal"}): "numeric",
    frozenset({"datetime"}): "timestamptz",
    frozenset({"date"}): "date",
    frozenset({"time"}): "time",
    frozenset({"timedelta"}): "interval",
    frozenset({"bytes"}): "bytea",
    frozenset({"UUID"}): "uuid",
    frozenset({"dict"}): "jsonb",
    frozenset({"list"}): "jsonb",
    frozenset({"dict", "list"}): "jsonb",
}
