"""Limits the bytes that the results of one execution have in the stores (``NOETL_EXECUTION_STORED_BYTES``).

A process counts what it stores, on top of what the catalog has recorded. It asks the catalog when it first stores a
result of an execution, and again when it has stored a sixteenth of the limit since, or would refuse a result. So
several processes together may exceed the limit by a sixteenth each.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from noetl_dagster.errors import StorageQuotaError
from noetl_dagster.storage.catalog import RefCatalog

_SHARE = 16
_FRESH_SECONDS = 10.0
"""Age up to which a sum is not asked for again, so that refusals in a loop cost nothing."""
_EXECUTIONS = 256


@dataclass(slots=True)
class _Count:
    """The bytes of one execution.

    Attributes:
        total: all that this process knows of.
        pending: those of this process that the catalog has not recorded yet.
        since: those that this process has added since it asked the catalog.
    """

    total: int = 0
    pending: int = 0
    since: int = 0
    asked: float = 0.0


class StoredBytes:
    """The stored bytes of executions, as this process knows them. ``most`` of None is no limit."""

    def __init__(self, most: int | None, catalog: RefCatalog) -> None:
        self._most, self._catalog = most, catalog
        self._counts: OrderedDict[int, _Count] = OrderedDict()

    async def add(self, execution_id: int, size: int, what: str, *, limited: bool = True) -> None:
        """Counts bytes that are about to be stored.

        Args:
            limited: False for a copy of what the log has already: it is counted, and never refused.

        Raises:
            StorageQuotaError: the execution would have more than its limit; nothing is counted.
        """
        if self._most is None:
            return
        count = self._counts.get(execution_id)
        if count is None or count.since * _SHARE > self._most:
            count = await self._asked(execution_id)
        if limited and count.total + size > self._most and time.monotonic() - count.asked > _FRESH_SECONDS:
            count = await self._asked(execution_id)
        if limited and count.total + size > self._most:
            raise StorageQuotaError(
                f"{what} has {size} bytes, and execution {execution_id} has stored {count.total} of "
                f"{self._most} bytes (NOETL_EXECUTION_STORED_BYTES); raise the limit and resume the execution, or let "
                "its steps return less"
            )
        count.total += size
        count.pending += size
        count.since += size

    def recorded(self, execution_id: int, size: int) -> None:
        """Notes that added bytes are recorded, or were not stored."""
        if (count := self._counts.get(execution_id)) is not None:
            count.pending -= size

    async def _asked(self, execution_id: int) -> _Count:
        recorded = await self._catalog.stored_bytes(execution_id)
        count = self._counts.setdefault(execution_id, _Count())
        self._counts.move_to_end(execution_id)
        if len(self._counts) > _EXECUTIONS:
            self._counts.popitem(last=False)
        if recorded is not None:  # else this process knows its own bytes only
            count.total = recorded + count.pending
        count.since, count.asked = 0, time.monotonic()
        return count
