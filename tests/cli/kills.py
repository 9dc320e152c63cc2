"""Processes of the command line that are killed when an event is on its way into the log, and resumed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg

from tests.cli.conftest import Cli
from tests.forked import Forked
from tests.waiting import HERE, until

LOCK = 4711
WAITING = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {LOCK} AND NOT granted AND {HERE}"

OVER = f"""
SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY($1::int[])) AND NOT EXISTS ({WAITING})
"""


def held_up(condition: str) -> str:
    """SQL that has events of a kind wait, inside of their transaction, for whoever holds the advisory lock."""
    return f"""
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NEW; END $$;
CREATE TRIGGER hold BEFORE INSERT ON noetl.event FOR EACH ROW WHEN ({condition})
EXECUTE FUNCTION hold();
"""


async def killed_at(
    condition: str,
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    pool: asyncpg.Pool[Any],
    *,
    lost: bool = True,
) -> int:
    """Starts a process, kills it when an event that fulfils a condition waits to be written; returns the execution.

    The transaction of the event is lost with the process, or is committed after its death.
    """
    await pool.execute(held_up(condition))
    async with pool.acquire() as holder:
        await holder.execute("SELECT pg_advisory_lock($1)", LOCK)
        await _killed_when_it_waits(command, environment, folder, pool)
        sessions = [row["pid"] for row in await pool.fetch(WAITING)]
        if lost:
            await pool.execute("SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS pid", sessions)
        else:
            await holder.execute("SELECT pg_advisory_unlock($1)", LOCK)
        await until(lambda: pool.fetchval(OVER, sessions), "its transactions to end")
        await holder.execute("SELECT pg_advisory_unlock_all()")
    return int(await pool.fetchval("SELECT max(execution_id) FROM noetl.event"))


async def resumed(cli: Cli, execution_id: int) -> dict[str, Any]:
    """Resumes an execution, and returns the overview of its completion."""
    ran = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
    assert ran.returncode == 0, ran.stderr
    overview: dict[str, Any] = json.loads(ran.stdout)
    assert overview["status"] == "COMPLETED", overview
    return overview


async def _killed_when_it_waits(
    command: list[str], environment: dict[str, str], folder: Path, pool: asyncpg.Pool[Any]
) -> None:
    """Starts a process, and kills it when its database waits for the lock."""
    said = folder / "said.txt"
    process = Forked("noetl-dagster", *command, environment=environment, folder=folder, output=said)

    async def waits() -> bool:
        assert process.poll() is None, said.read_text()
        return await pool.fetchval(WAITING) is not None

    try:
        await until(waits, "the lock to be waited for")
    finally:
        process.kill()
