"""Waiting for a condition: tests say what must come true, never how fast this machine is."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg
import psutil

from noetl_dagster.events.projection import Projection

PATIENCE_SECONDS = 240.0
"""Far longer than a busy machine needs. Only a test that fails anyway waits so long."""

PROCESS_SECONDS = 840.0
"""For a process to run to its end: just less than pytest waits for a test, so that its output is seen."""

HERE = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
"""Condition of ``pg_locks``, which shows the locks of all databases, those of tests beside this one too."""

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], what: str = "") -> T:
    """Waits until ``condition()``, awaited where it must be, is true; gives its value."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        await asyncio.sleep(0.02)


def until_now(condition: Callable[[], T], what: str = "", *, seconds: float = PATIENCE_SECONDS) -> T:
    """``until`` for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(0.02)
    return found


async def until_projected(pool: asyncpg.Pool[Any], execution_id: int, status: str | None = None) -> None:
    """Waits until the projection has an execution, in a status if one is given.

    Long transactions of other tests on this server hold its horizon back.
    """

    async def projected() -> bool:
        await Projection(pool).catch_up()
        found = await pool.fetchval("SELECT status FROM noetl.execution WHERE execution_id = $1", execution_id)
        return found is not None and status in (None, found)

    await until(projected, "the projection")


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
