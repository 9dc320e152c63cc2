"""A driver under load: executions side by side, each a fan-out to the pool, one after another until SIGTERM.

python -m benchmarks._load_driver <executions side by side> <items of each> <commands of each in flight>
"""

from __future__ import annotations

import asyncio
import signal
import sys

from benchmarks.fanout import PLAYBOOK
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings


async def drive(side_by_side: int, items: int, in_flight: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fanout = f"engine: workers, max_groups: 1, max_concurrent: {in_flight}"
    playbook = parse_playbook(PLAYBOOK.format(fanout=fanout, code="result = n"))
    engine = await Engine.open(Settings())

    async def again_and_again(number: int) -> None:
        count = items * (number + 1) // side_by_side  # not all of them end at the same time
        while not stop.is_set():
            state = await engine.run(playbook, {"items": count})
            assert state.status is ExecutionStatus.COMPLETED, state.error
            count = items

    try:
        await asyncio.gather(*map(again_and_again, range(side_by_side)))
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(drive(*map(int, sys.argv[1:])))
