"""Rows of a stored result, some at a time: however many there are, few stand in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from noetl_dagster.tools.rows.inside import rows_of

ROWS_AT_ONCE = 1_000
"""Rows of a batch at least, but for the last one."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A result that stays where it is stored, for whoever can do with some of its rows at a time.

    Attributes:
        parts: reads its rows from the first on: lists, or Arrow batches of a table.
        whole: reads the value that has them.
    """

    parts: Callable[[], AsyncIterator[Any]]
    whole: Callable[[], Awaitable[Any]]


async def batches_of(result: Any) -> AsyncIterator[list[Mapping[str, Any]]]:
    """The rows that :func:`rows_of` finds: of :class:`StoredRows` some at a time, of any other result together.

    No batch is empty. It may be asked for again, and gives the same.
    """
    if not isinstance(result, StoredRows):
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
    """Whether there is a row in a result."""
    async for _ in batches_of(result):
        return True
    return False
