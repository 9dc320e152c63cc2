"""How far a loop is, how fast it goes, and when it will be over."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from noetl_dagster.cli.commands.executions import _as_line
from noetl_dagster.cli.progress import loop_text
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.overview import ChunksView, LoopView, loop_progress, overview
from noetl_dagster.engine.executions.progress import duration, loop_rates
from noetl_dagster.events.types import Event, EventType
from tests.engine.conftest import Run
from tests.playbooks import playbook
from tests.waiting import until

GATED = """
workload: {gate: ""}
workflow:
  - step: start
    loop: {in: "{{ range(20) }}", iterator: n, spec: {mode: parallel, max_in_flight: 4}}
    tool:
      kind: python
      input: {n: "{{ n }}", gate: "{{ gate }}"}
      code: |
        import pathlib, time
        while n >= 8 and not pathlib.Path(gate).exists():
            time.sleep(0.02)
"""


def test_durations_are_for_people() -> None:
    assert [duration(seconds) for seconds in (0.2, 40, 200, 7_500)] == [
        "0 s",
        "40 s",
        "3 min 20 s",
        "2 h 5 min",
    ]


async def test_counts_come_from_the_log(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: [1, 2, 0, 4], iterator: n}
            spec: {loop_mode: fanout, fanout: {max_shard_retries: 1, allow_partial: true}}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / n"}
        """
    )
    loop = (await overview(engine.runtime, state.execution_id)).steps[0].loop
    assert loop is not None
    assert (loop.total, loop.done, loop.failed) == (4, 3, 1)
    assert loop_progress(loop) == "4 of 4 (100 %) done, 1 failed"


async def test_a_running_loop_has_a_rate_and_an_end_in_sight(engine: Engine, tmp_path: Path) -> None:
    execution = await engine.lifecycle.create(playbook(GATED), {"gate": str(tmp_path / "gate")})
    work = asyncio.create_task(engine.walker.run(execution))

    async def eight_are_done() -> LoopView | None:
        steps = (await overview(engine.runtime, execution.id)).steps
        loop = steps[0].loop if steps else None
        return loop if loop is not None and loop.done == 8 else None

    loop = await until(eight_are_done)
    assert loop is not None
    assert loop.rate is not None
    assert loop.rate > 0
    assert loop.remaining_seconds == round(12 / loop.rate, 1)
    (tmp_path / "gate").touch()
    await work
    ended = (await overview(engine.runtime, execution.id)).steps[0].loop
    assert ended is not None
    assert (ended.done, ended.rate, ended.remaining_seconds) == (20, None, None)


async def test_the_rate_is_that_of_the_last_events(engine: Engine) -> None:
    log, ids, now = engine.runtime.log, engine.runtime.ids, datetime.now(UTC)
    execution_id = ids.next()

    def event(seconds_ago: float, type_: EventType, number: int = 0) -> Event:
        meta = {"loop_id": "1", "command_id": str(number)} if number else {"loop_id": "1", "epoch": 2}
        moment = now - timedelta(seconds=seconds_ago)
        return Event(execution_id, ids.next(), type_, node_name="work", meta=meta, created_at=moment)

    def ends(first: int, count: int, since: float, until: float) -> list[Event]:
        step = (since - until) / count
        done = EventType.COMMAND_COMPLETED
        return [event(since - step * place, done, first + place) for place in range(count)]

    await log.append([event(90_000, EventType.LOOP_STARTED), *ends(1, 1_000, 90_000, 1_200)])
    await log.append(ends(1_001, 2_000, 1_200, 200))
    rate = (await loop_rates(engine.runtime.pool, execution_id))["1"]
    assert 0.5 < rate < 1.5, "two a second, and less since nothing comes"

    await log.append([event(100, EventType.EXECUTION_RESUMED), *ends(3_001, 50, 100, 0)])
    rate = (await loop_rates(engine.runtime.pool, execution_id))["1"]
    assert 0.1 < rate < 0.51, "nothing from before the resumption"


def test_the_status_line_of_a_loop() -> None:
    loop = LoopView(loop_id="1", total=20, done=7, failed=1, fanout=False, rate=2.5, remaining_seconds=4.8)
    assert loop_text(loop) == "7/20, 1 failed, 2.5/s, 5 s left"
    assert loop_text(LoopView(loop_id="1", total=20, done=20, failed=0, fanout=True)) == "20/20"
    assert loop_progress(loop) == "8 of 20 (40 %) done, 1 failed, 2.5/s, 5 s left"
    cursor = LoopView(loop_id="1", total=0, done=7, failed=0, fanout=False, rate=12.4)
    assert loop_progress(cursor) == "7 done, 12/s"
    assert loop_text(cursor) == "7, 12/s", "how many there are is not known before the end"
    taker = LoopView(loop_id="1", total=0, done=24, failed=0, fanout=False, rate=2.4, so_far=60)
    assert loop_text(taker) == "24 of 60 so far, 2.4/s"
    assert loop_text(None, ChunksView(made=60, rows=300_000)) == "60 chunks, 300000 rows"
    assert loop_text(taker, ChunksView(made=24)) == "24 of 60 so far, 24 chunks, 2.4/s"


def test_the_line_of_a_chunk() -> None:
    event = Event(execution_id=1, event_id=2, event_type=EventType.CALL_PARTIAL, node_name="read")
    event.meta = {"chunk_index": 3, "row_count": 5000, "has_more": True}
    assert _as_line(event, as_json=False).endswith("call.partial             read  chunk 3, 5000 rows")
    event.meta |= {"row_count": None, "has_more": False}
    assert _as_line(event, as_json=False).endswith("read  chunk 3, the last")
