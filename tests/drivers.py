"""Drivers of executions in processes of their own, which tests kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from noetl_dagster.tools.commands import container
from tests import forked
from tests.waiting import HERE, PATIENCE_SECONDS, until

LOCK = 4711
WAITING = f"""
SELECT objid::int AS number, pid FROM pg_locks
WHERE locktype = 'advisory' AND classid = {LOCK} AND NOT granted AND {HERE} ORDER BY 1
"""
END = f"""
SELECT pg_terminate_backend(pid) FROM ({WAITING}) AS waiting WHERE number IS DISTINCT FROM $1::int
"""
OVER = f"""
SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY($1::int[])) AND NOT EXISTS ({WAITING})
"""
HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} RETURN NEW; END $$;
CREATE TRIGGER hold BEFORE INSERT ON noetl.event FOR EACH ROW EXECUTE FUNCTION hold();
"""

T = TypeVar("T")


def drive(environment: Mapping[str, str], execution_id: int, said: Path) -> ForkServerProcess:
    """Starts a process that drives an execution, and writes down how it ended."""
    process = forked.process(environment, _drive, execution_id, said)
    process.start()
    return process


async def driven(settings: Settings, execution_id: int, folder: Path) -> None:
    """Has a process drive an execution until it is complete."""
    process = drive(_environment(settings), execution_id, folder / "said.txt")
    try:
        await asyncio.to_thread(process.join, PATIENCE_SECONDS)
    finally:
        process.kill()
    assert (folder / "said.txt").read_text() == "COMPLETED None"


async def killed_when(
    condition: Callable[[], T | Awaitable[T]], settings: Settings, execution_id: int, folder: Path
) -> T:
    """Starts a driver, and kills it and its children when a condition is true; returns the condition's value."""
    process = drive(_environment(settings), execution_id, folder / "said.txt")

    async def is_time() -> T:
        assert process.exitcode is None, "it was to be killed before its end"
        value = condition()
        return await value if isinstance(value, Awaitable) else value

    try:
        return await until(is_time, "the time to kill a driver")
    finally:
        os.killpg(process.pid or 0, signal.SIGKILL)
        await asyncio.to_thread(process.join)


async def killed_at(
    conditions: Sequence[str],
    settings: Settings,
    execution_id: int,
    folder: Path,
    pool: asyncpg.Pool[Any],
    *,
    lost: bool = True,
) -> AsyncIterator[str]:
    """Kills one driver after the other, each when an event that fulfils one of the conditions waits to be written.

    The transaction of the event is lost with the process, or is committed after its death.

    Yields:
        The condition, in SQL on the row ``NEW``. Its events wait no longer.
    """
    checks = (f"IF {one} THEN PERFORM pg_advisory_xact_lock({LOCK}, {n}); END IF;" for n, one in enumerate(conditions))
    await pool.execute(HOLD.format(" ".join(checks)))
    async with pool.acquire() as holder:
        for number in range(len(conditions)):
            await holder.execute("SELECT pg_advisory_lock($1, $2)", LOCK, number)
        for _ in conditions:
            waiting = await killed_when(lambda: pool.fetch(WAITING), settings, execution_id, folder)
            sessions, number = [row["pid"] for row in waiting], waiting[0]["number"]
            if not lost:
                await holder.execute("SELECT pg_advisory_unlock($1, $2)", LOCK, number)

            async def is_over(sessions: Sequence[int] = sessions, kept: int | None = None if lost else number) -> bool:
                """Ends what waits, also what has come to an event of another condition meanwhile."""
                await pool.execute(END, kept)
                return bool(await pool.fetchval(OVER, sessions))

            await until(is_over, "its transactions to end")
            if lost:
                await holder.execute("SELECT pg_advisory_unlock($1, $2)", LOCK, number)
            yield conditions[number]
    await pool.execute("DROP TRIGGER hold ON noetl.event")


def _environment(settings: Settings) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return {**others, **embedded.environment(settings)}


def _drive(execution_id: int, said: Path) -> None:
    os.setsid()
    container.POLL_SECONDS = 0.05  # as in the processes of the tests

    async def driven() -> str:
        engine = await Engine.open(Settings())
        state = await engine.resume(execution_id)
        await engine.close()
        return f"{state.status} {state.error}"

    said.write_text(asyncio.run(driven()))
