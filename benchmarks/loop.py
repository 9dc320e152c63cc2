"""What an item of a loop costs: a trivial python task with its whole trail of events, beside its raw insert.

    python -m benchmarks.loop --items 5000

In one run, on the embedded services: loops of each mode, then a bare COPY of the very same event rows in
batches. Prints microseconds an item, on the clock and of this process's CPU, and the ratio to the insert.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from benchmarks.fanout import database
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.log import as_row
from noetl_dagster.events.queries import COLUMNS
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings, get_settings

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: bench, path: bench/loop}}
workload: {{items: []}}
workflow:
  - step: each
    loop: {{in: "{{{{ workload['items'] }}}}", iterator: n, spec: {{{spec}}}}}
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = n * 2"}}
"""
MODES = {"sequential": "mode: sequential", "parallel": "mode: parallel, max_in_flight: 32"}
BATCH = 500


@dataclass(frozen=True)
class Cost:
    """Microseconds an item."""

    clock: float
    cpu: float


async def loop_cost(engine: Engine, mode: str, items: int) -> tuple[Cost, int]:
    """Runs a loop; also gives the execution's id."""
    playbook = parse_playbook(PLAYBOOK.format(spec=MODES[mode]))
    start, cpu = time.perf_counter(), time.process_time()
    state = await engine.run(playbook, {"items": list(range(items))})
    spent = Cost((time.perf_counter() - start) / items * 1e6, (time.process_time() - cpu) / items * 1e6)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return spent, state.execution_id


async def insert_cost(engine: Engine, execution_id: int, items: int) -> Cost:
    """Inserts the events of an execution once more, into a table like the log's."""
    pool = engine.runtime.pool
    rows = [as_row(event) async for event in engine.runtime.log.events(execution_id)]
    await pool.execute("CREATE TABLE IF NOT EXISTS noetl.bench (LIKE noetl.event INCLUDING ALL)")
    start, cpu = time.perf_counter(), time.process_time()
    async with pool.acquire() as connection:
        for first in range(0, len(rows), BATCH):
            await connection.copy_records_to_table(
                "bench", schema_name="noetl", columns=COLUMNS, records=rows[first : first + BATCH]
            )
    spent = Cost((time.perf_counter() - start) / items * 1e6, (time.process_time() - cpu) / items * 1e6)
    await pool.execute("DROP TABLE noetl.bench")
    return spent


async def measure(settings: Settings, items: int) -> None:
    engine = await Engine.open(settings)
    try:
        await loop_cost(engine, "parallel", 50)  # compiles, connects, starts threads
        for mode in MODES:
            cost, execution_id = await loop_cost(engine, mode, items)
            bare = await insert_cost(engine, execution_id, items)
            print(
                f"{mode}, {items} items: {cost.clock:.0f} us an item, {cost.cpu:.0f} us of CPU; "
                f"bare insert of its events {bare.clock:.0f} us; ratio {cost.clock / bare.clock:.1f}"
            )
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--items", type=int, default=5000)
    arguments = parser.parse_args()
    with database(embedded.ensure(get_settings())) as settings:
        asyncio.run(measure(settings, arguments.items))


if __name__ == "__main__":
    main()
