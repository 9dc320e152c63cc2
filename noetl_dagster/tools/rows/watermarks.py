"""Watermarks: up to which value the rows of a source have been loaded, and which of two values is greater."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.values import RefusedValueError, admit

Value = int | float | str

_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"(?:[T ](?P<time>\d\d:\d\d(?::\d\d)?)(?P<fraction>\.\d+)?\s?(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?)?"
)
_DECIMAL = re.compile(r"-?\d+(\.\d+)?")
_COLUMNS_SHOWN = 20


def rank(value: Value) -> Value:
    """Returns the value by which a watermark is compared: of a time its text in UTC, which sorts by time.

    A time without an offset is in UTC, and a date is its midnight. Numbers and other texts are compared as they are.
    """
    if not isinstance(value, str) or (time := _TIME.fullmatch(value.strip())) is None:
        return value
    zone = "+00:00" if time["zone"] in (None, "Z") else time["zone"]
    try:
        moment = datetime.fromisoformat(f"{time['date']}T{time['time'] or '00:00'}{zone}")
        text = moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # a thirteenth month, or a time before the first year
        return value
    return text + (time["fraction"] or "").rstrip("0").rstrip(".")


def _goes_beyond(value: Value, other: Value, step: str) -> bool:
    first, second = rank(value), rank(other)
    if isinstance(first, str) != isinstance(second, str):
        raise _unfit(
            step,
            f"{value!r} and {other!r} cannot be compared; let state.key and state.initial both give numbers, or "
            "both times or texts",
        )
    texts = [str(order) for order in (first, second) if isinstance(order, str) and _DECIMAL.fullmatch(order)]
    if len(texts) == 2 and (texts[0] > texts[1]) is not (Decimal(texts[0]) > Decimal(texts[1])):
        raise _unfit(
            step,
            f"{value!r} and {other!r} are numbers as text, which sort in another way; let the query of state.key give "
            "numbers: ::bigint, ::float8, or numbers: float",
        )
    return first > second  # type: ignore[operator]


def greatest(values: Iterable[Any], step: str) -> Value | None:
    """Returns the greatest value that is not missing, if any; raises ``ToolError`` if they cannot be compared."""
    most: Value | None = None
    for value in values:
        plain = _plain(value, step)
        if plain is not None and (most is None or _goes_beyond(plain, most, step)):
            most = plain
    return most


async def greatest_of_batches(batches: AsyncIterable[Sequence[Mapping[str, Any]]], key: str, step: str) -> Value | None:
    """Returns the greatest value of a column (a dotted path) among the rows of a result; None if there are no rows.

    Raises:
        ToolError: there are rows and none of them has the column; or as :func:`greatest`.
    """
    path, has_column = key.split("."), False
    first: Mapping[str, Any] | None = None
    most: Value | None = None
    async for rows in batches:
        first = rows[0] if first is None else first
        values = [value for row in rows if (value := _at(row, path)) is not _MISSING]
        has_column = has_column or bool(values)
        most = greatest([most, *values], step)
    if first is not None and not has_column:
        columns = ", ".join(map(str, list(first)[:_COLUMNS_SHOWN])) or "none"
        raise _unfit(step, f"no row of the result has the column {key!r} of state.key; columns: {columns}")
    return most


def moved(watermark: Mapping[str, Any], value: Value | None, step: str) -> dict[str, Any] | None:
    """Returns the log's record of a watermark that advances to a value; None if the value is not greater.

    Args:
        kept: the watermark when the step was entered.
    """
    before = watermark["value"]
    if value is None or (before is not None and not _goes_beyond(value, before, step)):
        return None
    # since: the event that last set it by hand, 0 if none has
    identity = {name: watermark[name] for name in ("playbook", "name", "partition", "since")}
    return identity | {"value": value, "previous": before} | order_of(value)


def order_of(value: Value) -> dict[str, Value]:
    """Returns the value by which the log finds the greatest watermark: ``number`` or ``text``."""
    order = rank(value)
    return {"text" if isinstance(order, str) else "number": order}


_MISSING = object()


def _at(row: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(row, Mapping) or name not in row:
            return _MISSING
        row = row[name]
    return row


def _plain(value: Any, step: str) -> Value | None:
    """Returns a value as JSON; None if it is missing."""
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return None
    try:
        plain = admit(value)
    except RefusedValueError as error:
        raise _unfit(step, f"state.key gives what is no watermark: {error}") from None
    if plain is None or (isinstance(plain, int | float | str) and not isinstance(plain, bool)):
        return plain
    raise _unfit(step, f"state.key gives {plain!r:.80}; a watermark is a number, a time or a text")


def _unfit(step: str, why: str) -> ToolError:
    return ToolError(f"step {step}: {why}", kind="schema", code="WATERMARK")
