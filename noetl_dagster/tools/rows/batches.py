"""The rows of a result, all at once or a batch at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from noetl_dagster.tools.rows.jsonable import is_table


def rows_of(value: Any) -> list[Mapping[str, Any]]:
    """Returns the rows inside a result.

    These are the body of an http result; the list of mappings under ``rows``, ``data`` or ``items``; the mapping itself
    as one row; the rows of a table. Any other value becomes a row ``{value: ...}``.
    """
    if is_table(value):
        return list(value.to_dict("records") if hasattr(value, "to_dict") else value.to_pylist())
    if isinstance(value, Mapping):
        if "status_code" in value and "data" in value:
            return rows_of(value["data"])
        for name in ("rows", "data", "items"):
            inner = value.get(name)
            if isinstance(inner, list) and all(isinstance(item, Mapping) for item in inner):
                return inner
        return [value]
    if isinstance(value, list | tuple):
        # the exact type first: a check of an abstract class takes as long as the rest
        return [item if type(item) is dict or isinstance(item, Mapping) else {"value": item} for item in value]
    return [] if value is None else [{"value": value}]


ROWS_AT_ONCE = 1_000  # of a batch at least, except the last one


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result that stays in its store.

    Attributes:
        parts: reads its rows, in lists or Arrow batches.
        whole: reads the value that contains them.
    """

    parts: Callable[[], AsyncIterator[Any]]
    whole: Callable[[], Awaitable[Any]]


async def batches_of(result: Any) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Yields the rows that :func:`rows_of` finds: those of a :class:`StoredResult` batch by batch, others together.

    No batch is empty. Every call yields the same batches.
    """
    if not isinstance(result, StoredResult):
        if rows := rows_of(result):
            yield rows
        return
    waiting: list[Mapping[str, Any]] = []
    async for part in result.parts():
        waiting += rows_of(part)
        if len(waiting) >= ROWS_AT_ONCE:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


async def has_rows(result: Any) -> bool:
    """Returns whether a result has a row."""
    return await anext(batches_of(result), None) is not None
