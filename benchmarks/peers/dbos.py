"""DBOS: one workflow with a step an item, on PostgreSQL."""

from __future__ import annotations

import asyncio

from dbos import DBOS

from benchmarks.peers.report import RUNS, WARM_ITEMS, Watch, check, task


@DBOS.step()
async def double(n: int) -> int:
    return n * 2


@DBOS.workflow()
async def fan(items: int) -> list[int]:
    return await asyncio.gather(*[double(n) for n in range(items)])


async def main() -> None:
    told, watch = task(), Watch()
    DBOS(
        config={
            "name": "peers",
            "system_database_url": told.database,
            "run_admin_server": False,
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
    try:
        await fan(WARM_ITEMS)
        for _ in range(RUNS):
            with watch.running():
                results = await fan(told.items)
            check(results, told.items)
    finally:
        DBOS.destroy()
    watch.report("dbos", told.items, "a step an item, all at once in one workflow; PostgreSQL")


if __name__ == "__main__":
    asyncio.run(main())
