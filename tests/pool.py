"""Workers of the pool, in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from noetl_dagster.pool_worker.worker import PoolWorker
from noetl_dagster.settings import Settings


@asynccontextmanager
async def working(settings: Settings, worker_id: str, **changes: Any) -> AsyncIterator[PoolWorker]:
    """A worker that takes commands until the block ends."""
    worker = await PoolWorker.open(settings.model_copy(update=changes), worker_id)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await running
        await worker.close()
