"""The newest executions: all, those of a partition, those that made a result of an asset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

from noetl_dagster.events.queries import (
    EXECUTIONS,
    EXECUTIONS_OF_PARTITION,
    EXECUTIONS_THAT_MADE,
    EXECUTIONS_THAT_MADE_PARTITION,
)


async def newest_executions(
    pool: asyncpg.Pool[Any],
    limit: int,
    *,
    after: int = 0,
    partition: str | None = None,
    asset: str | None = None,
) -> list[Mapping[str, Any]]:
    """Executions, the newest first, whatever became of them.

    Args:
        after: only those with a larger id.
        partition: only those of the partition with this key; of two dimensions ``2026-01-01|berlin``.
        asset: only those that made a result of the asset with this key, its parts joined by slashes.
    """
    wanted = [one for one in (partition, asset) if one is not None]
    queries = {
        (False, False): EXECUTIONS,
        (True, False): EXECUTIONS_OF_PARTITION,
        (False, True): EXECUTIONS_THAT_MADE,
        (True, True): EXECUTIONS_THAT_MADE_PARTITION,
    }
    query = queries[partition is not None, asset is not None]
    found: list[Mapping[str, Any]] = await pool.fetch(query, after, limit, *wanted)
    return found
