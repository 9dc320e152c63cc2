"""What status tells of steps in the pool, from the queue and from claims and ends in the log."""

from __future__ import annotations

import asyncio
import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from noetl_dagster.cli.commands.executions import _pool_figures, _pool_table
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions import progress
from noetl_dagster.engine.executions.overview import Overview, StepView, full_overview
from noetl_dagster.engine.executions.progress import PoolView, brief, pool_views, running_notes
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import Settings
from tests.playbooks import playbook
from tests.pool import working
from tests.waiting import until

TEXT = """
workflow:
  - step: start
    tool: {kind: noop}
    next: [pooled]
  - step: pooled
    spec: {dispatch: workers}
    loop: {in: "{{ range(3) | list }}", iterator: n, mode: parallel}
    tool: {kind: noop}
    next: [waits]
  - step: waits
    spec: {dispatch: workers}
    tool: {kind: noop}
"""


async def steps(engine: Engine, execution_id: int) -> dict[str, StepView]:
    return {step.step: step for step in (await full_overview(engine.runtime, execution_id)).steps}


class Commands:
    """Commands of a step, written into the log as claims and handler write them."""

    def __init__(self, engine: Engine, execution_id: int, step: str = "pooled") -> None:
        self._engine, self.execution_id, self._step = engine, execution_id, step

    async def claimed(self, first: int, waits: list[float]) -> None:
        await self._append(
            [
                self._event(EventType.COMMAND_CLAIMED, first + place, waited=seconds)
                for place, seconds in enumerate(waits)
            ]
        )

    async def ended(self, first: int, durations: list[float | None], *, ago: float = 0.0) -> None:
        events = []
        for place, seconds in enumerate(durations):
            event = self._event(EventType.COMMAND_COMPLETED, first + place)
            event.duration, event.created_at = seconds, datetime.now(UTC) - timedelta(seconds=ago)
            events.append(event)
        await self._append(events)

    def _event(self, type_: EventType, index: int, **meta: float) -> Event:
        command_id = f"{self.execution_id}:{self._step}:1:{index}:1"
        return Event(
            self.execution_id,
            self._engine.runtime.ids.next(),
            type_,
            node_name=self._step,
            meta={"command_id": command_id, **meta},
        )

    async def _append(self, events: list[Event]) -> None:
        await self._engine.runtime.log.append(events)


@pytest.fixture
async def execution_id(engine: Engine) -> int:
    return (await engine.lifecycle.create(playbook(TEXT))).id


@pytest.fixture
def commands(engine: Engine, execution_id: int) -> Commands:
    return Commands(engine, execution_id)


async def view(engine: Engine, execution_id: int) -> PoolView:
    return (await pool_views(engine.runtime.pool, execution_id, ["start", "pooled"]))["pooled"]


async def test_steps_of_the_pool_and_others(engine: Engine, settings: Settings) -> None:
    text = TEXT.replace("{dispatch: workers}\n    tool", "{}\n    tool")
    async with working(settings, "w1"):
        state = await engine.run(playbook(text))
    found = await steps(engine, state.execution_id)
    assert found["start"].pool is None
    assert found["waits"].pool is None
    assert isinstance(found["pooled"].pool, PoolView)
    assert found["pooled"].pool.queue_p50 is not None
    assert found["pooled"].pool.run_p99 is not None
    assert found["pooled"].pool.rate is None  # it has ended
    assert (found["pooled"].pool.waiting, found["pooled"].pool.running) == (0, 0)


async def test_nobody_takes_the_commands(engine: Engine, execution_id: int) -> None:
    execution = await engine.runtime.load(execution_id)
    driving = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))

    async def three_wait() -> PoolView | None:
        step = (await steps(engine, execution_id)).get("pooled")
        return step.pool if step is not None and step.pool is not None and step.pool.waiting == 3 else None

    assert await until(three_wait, "commands in the queue") == PoolView(waiting=3, unattended="default")
    await cancel_and_wait(driving)


async def test_times_of_claims_and_ends(engine: Engine, commands: Commands) -> None:
    await commands.claimed(0, [0.1 * number for number in range(101)])
    found = await view(engine, commands.execution_id)
    assert (found.queue_p50, found.queue_p99) == pytest.approx((5.0, 9.9))
    assert (found.run_p50, found.run_p99, found.rate) == (None, None, None)
    await commands.ended(0, [1.0, 3.0, None])
    found = await view(engine, commands.execution_id)
    assert (found.run_p50, found.run_p99) == pytest.approx((2.0, 2.98))
    assert found.rate is not None
    assert found.rate > 0


async def test_only_the_latest_count(engine: Engine, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATEST", 10)
    await commands.claimed(0, [100.0] * 50)
    await commands.ended(0, [100.0] * 50)
    await commands.claimed(50, [1.0] * 10)
    await commands.ended(50, [2.0] * 5)
    await commands.ended(1000, [300.0] * 5)  # somebody else's, claimed in no pool
    found = await view(engine, commands.execution_id)
    assert (found.queue_p50, found.queue_p99, found.run_p50, found.run_p99) == (1.0, 1.0, 2.0, 2.0)


async def test_a_command_that_was_claimed_again_ends_once(engine: Engine, commands: Commands) -> None:
    for _ in range(3):  # two workers gave it back
        await commands.claimed(0, [1.0])
    await commands.claimed(1, [1.0, 1.0])
    await commands.ended(0, [9.0, 2.0, 2.0])
    assert (await view(engine, commands.execution_id)).run_p50 == 2.0


async def test_what_runs_now_hides_no_end(engine: Engine, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATEST", 10)
    await commands.claimed(0, [1.0] * 10)
    await commands.ended(0, [2.0] * 10)
    await commands.claimed(10, [1.0] * 30)
    await engine.runtime.pool.execute(
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, worker_id) "
        "SELECT $1, number::text, 0, 'pooled', 'noop', 'leased', 'w1' FROM generate_series(1, 30) AS number",
        commands.execution_id,
    )
    found = await view(engine, commands.execution_id)
    assert (found.running, found.run_p50) == (30, 2.0)


@pytest.mark.parametrize(("seconds", "silent"), [(0, ""), (7_200, "2 h 0 min")])
async def test_a_worker_that_is_silent_is_noted(engine: Engine, execution_id: int, seconds: int, silent: str) -> None:
    await engine.runtime.pool.execute(
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, worker_id) "
        "SELECT $1, number::text, 0, 'pooled', 'noop', 'leased', 'w1' FROM generate_series(1, 3) AS number",
        execution_id,
    )
    await engine.runtime.pool.execute(
        "INSERT INTO noetl.runtime (worker_id, heartbeat) VALUES ('w1', now() - make_interval(secs => $1))", seconds
    )
    notes = await running_notes(engine.runtime.pool, execution_id)
    expected = {"pooled": f"worker w1 holds 3 commands, and has not reported for {silent}"}
    assert notes == (expected if silent else {})


async def test_the_rate_is_that_since_the_latest_start(engine: Engine, commands: Commands) -> None:
    await commands.claimed(0, [1.0] * 8)
    await commands.ended(0, [2.0] * 5, ago=3600)  # before the execution was started
    found = await view(engine, commands.execution_id)
    assert (found.run_p50, found.rate) == (2.0, None)
    await commands.ended(5, [2.0])
    assert (await view(engine, commands.execution_id)).rate is None  # nobody can tell from one
    await commands.ended(6, [2.0])
    assert (await view(engine, commands.execution_id)).rate is not None


async def test_only_so_many_waiting_commands_are_counted(
    engine: Engine, execution_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.runtime.pool.execute(
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind) "
        "SELECT $1, number::text, 0, 'pooled', 'noop' FROM generate_series(1, 30) AS number",
        execution_id,
    )
    assert (await view(engine, execution_id)).waiting == 30
    monkeypatch.setattr(progress, "MOST_WAITING", 20)
    assert (await view(engine, execution_id)).waiting == 20


def test_the_table_has_a_row_for_each_step_of_the_pool() -> None:
    view = PoolView(waiting=7, running=2, queue_p50=0.25, queue_p99=2.0)
    steps = (
        StepView(step="here", status="RUNNING", visits=1),
        StepView(step="there", status="RUNNING", visits=1, pool=view),
    )
    console = Console(width=100, file=io.StringIO())
    console.print(_pool_table(Overview(execution_id="1", playbook="p", status="RUNNING", epoch=1, steps=steps)))
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines[1:]] == [["there", "7", "2", "250", "ms", "2.0", "s"]]


def test_figures_for_people() -> None:
    assert _pool_figures(PoolView(waiting=3)) == ["3", "0", "", "", "", "", ""]
    most = PoolView(
        waiting=progress.MOST_WAITING,
        running=2,
        rate=31.2,
        queue_p50=0.0042,
        queue_p99=1.25,
        run_p50=59.99,
        run_p99=3700,
    )
    assert _pool_figures(most) == ["10000+", "2", "31/s", "4 ms", "1.2 s", "1 min 0 s", "1 h 1 min"]
    assert [brief(seconds) for seconds in (0.0, 0.9994, 0.9996, 59.9)] == [
        "0 ms",
        "999 ms",
        "1.0 s",
        "59.9 s",
    ]
