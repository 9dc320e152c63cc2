"""Fan-outs over the pool of workers whose tools write down what they do, and what must hold of one in the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import asyncpg

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.playbook.models import Playbook
from tests.ledger import lines
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS, until

FAN = """
workload: {ledger: "", items: 10, held: 0, seconds: 0.002}
workflow:
  - step: fan
    loop: {in: "{{ range(items) | list }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {engine: workers, max_groups: 2, max_concurrent: 1000}}
    tool:
      kind: python
      input: {n: "{{ n }}", ledger: "{{ ledger }}", held: "{{ held }}", seconds: "{{ seconds }}"}
      code: |
        import os, pathlib, time
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{n} {os.getpid()}\\n".encode())
        os.close(descriptor)
        while n < held and not pathlib.Path(ledger + ".go").exists():
            time.sleep(0.02)
        time.sleep(seconds)
        result = n
    next: [total]
  - step: total
    tool: {kind: python, input: {items: "{{ fan.results }}"}, code: "result = [len(items), sum(items)]"}
"""
SMALL = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: "{{ range(40) | list }}", iterator: n, mode: parallel, max_in_flight: 40}
    tool: {kind: noop}
"""

QUEUE = "SELECT count(*) FROM noetl.queue"
LETTERS = "SELECT count(*) FROM noetl.dead_letter"
EVENTS = "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1"
ENDS = """
SELECT meta ->> 'command_id' AS command_id, count(*) FROM noetl.event WHERE execution_id = $1
AND event_type IN ('loop.shard.done', 'loop.shard.failed', 'command.completed', 'command.failed') GROUP BY 1
"""
DONE = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.shard.done'"
HELD = """
SELECT claimed.current_index FROM noetl.event claimed
WHERE claimed.execution_id = $1 AND claimed.event_type = 'command.claimed' AND claimed.worker_id = $2
  AND claimed.current_index IS NOT NULL AND NOT EXISTS (
    SELECT FROM noetl.event ended WHERE ended.execution_id = $1
      AND ended.meta ->> 'command_id' = claimed.meta ->> 'command_id' AND ended.event_type = 'loop.shard.done')
"""
TOTAL = """
SELECT result -> 'data' FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.exit' AND node_name = 'total'
"""


def held_up(condition: str) -> str:
    """SQL that has events of a kind wait, on their way into the log, for whoever holds the advisory lock (1, 1)."""
    return f"""
CREATE FUNCTION wait_for_the_test() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1, 1);
    RETURN NEW;
END $$;
CREATE TRIGGER held_up BEFORE INSERT ON noetl.event FOR EACH ROW
WHEN ({condition}) EXECUTE FUNCTION wait_for_the_test();
"""


class Fan:
    """A fan-out that is on its way. The first ``held`` items wait until :meth:`go`; of ``seconds`` is each one."""

    def __init__(self, engine: Engine, folder: Path, name: str = "fan") -> None:
        self.engine = engine
        self.ledger = folder / f"{name}.ledger"
        self.ledger.touch()
        self.items = 0
        self.execution_id = 0
        self._driving: asyncio.Task[ExecutionState]

    @classmethod
    async def start(
        cls,
        engine: Engine,
        folder: Path,
        items: int,
        *,
        name: str = "fan",
        held: int = 0,
        seconds: float = 0.002,
    ) -> Fan:
        fan = cls(engine, folder, name)
        fan.items = items
        workload = {"ledger": str(fan.ledger), "items": items, "held": held, "seconds": seconds}
        execution = await engine.lifecycle.create(playbook(FAN), workload)
        fan.execution_id = execution.id
        fan._driving = asyncio.create_task(engine.resume(execution.id))
        return fan

    @classmethod
    def driven_elsewhere(cls, engine: Engine, ledger: Path, execution_id: int, items: int) -> Fan:
        """One that another process drives; the engine only looks on."""
        fan = cls(engine, ledger.parent, ledger.stem)
        fan.items, fan.execution_id = items, execution_id

        async def ended() -> ExecutionState:
            state = await engine.runtime.state(execution_id)
            while state.status is ExecutionStatus.RUNNING:
                await asyncio.sleep(0.1)
                state = await engine.runtime.state(execution_id)
            return state

        fan._driving = asyncio.create_task(ended())
        return fan

    @property
    def is_over(self) -> bool:
        return self._driving.done()

    @property
    def begun(self) -> list[int]:
        """The items whose tools began, once for each time."""
        return [n for n, _ in lines(self.ledger)]

    def go(self) -> None:
        Path(f"{self.ledger}.go").touch()

    async def done(self) -> int:
        return int(await self.engine.runtime.pool.fetchval(DONE, self.execution_id))

    async def held_by(self, worker_id: str) -> set[int]:
        """Items that a worker has claimed and that have not ended, as far as the log knows."""
        return {row[0] for row in await self.engine.runtime.pool.fetch(HELD, self.execution_id, worker_id)}

    async def until_done(self, count: int) -> None:
        async def enough() -> bool:
            return await self.done() >= count

        await until(enough, f"{count} of {self.items} shards to be done")

    async def is_whole(self, again: Collection[int] = ()) -> Counter[str]:
        """Waits for the end; nothing is lost, nothing is twice in the log, nothing is left over.

        It waits for less than the ten minutes of a lease, which nobody must have to wait for.

        Args:
            again: items whose tools may have begun more than once.

        Returns:
            The events of the execution by type.
        """
        state = await self.ended()
        assert state.status is ExecutionStatus.COMPLETED, state.error
        pool = self.engine.runtime.pool
        assert await pool.fetchval(TOTAL, self.execution_id) == [self.items, sum(range(self.items))]
        found = Counter(dict(await pool.fetch(EVENTS, self.execution_id)))
        assert found["loop.shard.enqueued"] == found["loop.shard.done"] == self.items
        assert found["command.issued"] == self.items + 1  # with that of the last step
        assert found["loop.fanin.completed"] == found["playbook.completed"] == 1
        assert not found["loop.shard.failed"] + found["command.failed"]
        ends = dict(await pool.fetch(ENDS, self.execution_id))
        assert len(ends) == self.items + 1
        assert set(ends.values()) == {1}
        ran = Counter(self.begun)
        assert set(ran) == set(range(self.items))
        twice = {item for item, count in ran.items() if count > 1}
        assert twice <= set(again), f"ran twice: {sorted(twice - set(again))}"
        await nothing_left(pool)
        return found

    async def ended(self) -> ExecutionState:
        """Waits until the driver stops; raises why it did."""
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            return await self._driving

    async def cancelled(self) -> None:
        await asyncio.wait([self._driving], timeout=PATIENCE_SECONDS)
        assert self._driving.exception() is not None or (self._driving.result().status is ExecutionStatus.CANCELLED)


async def nothing_left(pool: asyncpg.Pool, letters: int = 0) -> None:
    """The queue is empty, or soon is: a row goes with the last of several ingestors' transactions."""

    async def is_empty() -> bool:
        return not await pool.fetchval(QUEUE)

    await until(is_empty, "an empty queue")
    assert await pool.fetchval(LETTERS) == letters


async def warm(engine: Engine) -> None:
    """Has the workers see that commands are short: from now on they claim ahead of their slots."""
    state = await engine.run(small())
    assert state.status is ExecutionStatus.COMPLETED, state.error


def small() -> Playbook:
    return playbook(SMALL, name="small")


async def held_rows(pool: asyncpg.Pool, worker_id: str) -> list[Any]:
    return await pool.fetch("SELECT * FROM noetl.queue WHERE status = 'leased' AND worker_id = $1", worker_id)
