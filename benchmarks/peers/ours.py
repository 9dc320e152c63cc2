"""Ours: one fan-out, on as many processes as ``--mode`` says."""

from __future__ import annotations

import asyncio

from benchmarks.fanout import PLAYBOOK
from benchmarks.peers.report import RUNS, Watch, task
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings

WARM_ITEMS = 2_000
"""Enough work for the helper processes to be started meanwhile."""


async def main() -> None:
    told, watch = task(), Watch()
    processes = int(told.mode)
    own = {"db_url": told.database, "run_processes": processes}
    engine = await Engine.open(embedded.ensure(Settings()).model_copy(update=own))
    try:
        await _fan(engine, WARM_ITEMS)
        while len(engine.helpers.pids) < processes - 1:
            await _fan(engine, WARM_ITEMS)
        for _ in range(RUNS):
            with watch.running():
                await _fan(engine, told.items)
    finally:
        await engine.close()
    word = "process" if processes == 1 else "processes"
    note = f"a python item with four events, {processes} {word}; PostgreSQL"
    watch.report("noetl-dagster", told.items, note)


async def _fan(engine: Engine, items: int) -> None:
    playbook = parse_playbook(PLAYBOOK.format(fanout="engine: dagster"))
    state = await engine.run(playbook, {"items": items})
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["fan"].envelope["failed"] == 0


if __name__ == "__main__":
    asyncio.run(main())
