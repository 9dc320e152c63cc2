"""Processes of the command line that are killed when an event is on its way into the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg

from tests.forked import Forked
from tests.waiting import HERE, until

LOCK = 4711
WAITING = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {LOCK} AND NOT granted AND {HERE}"


def held_up(condition: str) -> str:
    """SQL that has events of a kind wait, inside of their transaction, for whoever holds the advisory lock."""
    return f"""
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NEW; END $$;
CREATE TRIGGER hold BEFORE INSERT ON noetl.event FOR EACH ROW WHEN ({condition})
EXECUTE FUNCTION hold();
"""


async def killed_at(
    condition: str, command: list[str], environment: dict[str, str], folder: Path, pool: asyncpg.Pool[Any]
) -> None:
    """Starts a process, and kills it when an event that fulfils a condition waits to be written."""
    await pool.execute(held_up(condition))
    async with pool.acquire() as holder:
        await holder.execute("SELECT pg_advisory_lock($1)", LOCK)
        await _killed_when_it_waits(command, environment, folder, pool)
        await holder.execute("SELECT pg_advisory_unlock($1)", LOCK)


async def _killed_when_it_waits(
    command: list[str], environment: dict[str, str], folder: Path, pool: asyncpg.Pool[Any]
) -> None:
    """Starts a process, kills it when its database waits for the lock, and what it had open there."""
    said = folder / "said.txt"
    process = Forked("noetl-dagster", *command, environment=environment, folder=folder, output=said)

    async def waits() -> bool:
        assert process.poll() is None, said.read_text()
        return await pool.fetchval(WAITING) is not None

    try:
        await until(waits, "the lock to be waited for")
    finally:
        process.kill()
    await pool.execute(f"SELECT pg_terminate_backend(pid) FROM ({WAITING}) AS waiting")

    async def gone() -> bool:
        return await pool.fetchval(WAITING) is None

    await until(gone, "its transactions to end")
