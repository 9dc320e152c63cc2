"""The state of an execution for people who watch it: the same at every pace, and each event once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.iterations import (
    Iteration,
    IterationFilter,
    IterationState,
    durations,
    events_of_command,
    events_of_iteration,
    failure_groups,
    list_iterations,
)
from noetl_dagster.engine.executions.listing import ExecutionFilter, count_executions, list_executions
from noetl_dagster.engine.executions.trail import EventFilter, all_filtered_events, filtered_events
from noetl_dagster.engine.executions.watching import SLOW_SECONDS, WatchedExecution, changes_between, visits_of_step
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.ids import snowflake_milliseconds
from noetl_dagster.events.projection import Projection, read_execution
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.settings import Settings
from tests.playbooks import playbook
from tests.waiting import until

LOOP = """
workload: {flag: none, mode: fanout, who: Ada}
workflow:
  - step: start
    tool: {kind: python, code: "result = list(range(23))"}
    next: [each]
  - step: each
    loop: {in: "{{ start }}", iterator: n, mode: MODE, spec: {max_in_flight: 5}}
    tool:
      kind: python
      input: {n: "{{ iter.n }}"}
      code: |
        from pathlib import Path
        import time
        if n % 10 == 7 and not Path("FLAG").exists():
            raise ValueError(f"item {n} is broken")
        time.sleep(0.3 if n == 3 else 0)
        result = n
    next: [end]
  - step: end
    tool: {kind: noop}
"""


async def failed_and_resumed(engine: Engine, settings: Settings, mode: str) -> tuple[ExecutionState, ExecutionState]:
    flag = settings.home / "mended"
    text = LOOP.replace("MODE", mode).replace("FLAG", str(flag))
    failed = await engine.run(playbook(text), {"flag": str(flag)})
    flag.touch()
    return failed, await engine.resume(failed.execution_id)


@pytest.mark.parametrize("projected", [False, True], ids=["from the log", "from the projection"])
async def test_who_watches_sees_each_change_once_and_the_same_state(
    engine: Engine, settings: Settings, projected: bool
) -> None:
    pool = engine.runtime.pool
    running = asyncio.create_task(failed_and_resumed(engine, settings, "fanout"))
    row = await until(lambda: pool.fetchrow("SELECT execution_id FROM noetl.event LIMIT 1"), "the first event")
    execution_id = row["execution_id"]
    if projected:
        await Projection(pool).catch_up()
    watched = await WatchedExecution.read(pool, execution_id)
    first, events = watched.position, []

    async def follow() -> bool:
        nonlocal watched
        before, watched = watched.position, await WatchedExecution.read(pool, execution_id)
        events.extend(await changes_between(pool, execution_id, before, watched.position))
        # an older transaction of the server, of another test perhaps, holds the latest events back
        return "playbook.completed" in {one.event_type for one in events}

    while not running.done():
        await follow()
        await asyncio.sleep(0.01)
    failed, resumed = running.result()
    await until(follow, "the end")
    assert (failed.status, resumed.status, watched.row.status) == ("FAILED", "COMPLETED", "COMPLETED")
    assert len({one.event_id for one in events}) == len(events)
    missed = await changes_between(pool, execution_id, first, watched.position)
    assert {one.event_id for one in missed} == {one.event_id for one in events}
    whole = await read_execution(pool, execution_id)
    assert whole is not None
    assert watched.row.state == whole.state
    assert [one.step for one in watched.visits.values()] == ["start", "each", "end"]
    loop = watched.loop_of("each")
    assert loop is not None
    assert (loop.total, loop.done, loop.failed, loop.fanout) == (23, 23, 0, True)
    assert 3 in {one.iteration for one in watched.slowest}
    everything = await changes_between(pool, execution_id, 0, watched.position)
    errors = {str(one.error) for one in everything if one.event_type == "loop.shard.failed"}
    assert len(errors) == 2
    assert all("is broken" in error for error in errors)


async def test_an_execution_as_it_was_at_an_event(engine: Engine, settings: Settings) -> None:
    pool = engine.runtime.pool
    failed, _ = await failed_and_resumed(engine, settings, "fanout")
    execution_id = failed.execution_id
    [end] = await filtered_events(pool, execution_id, EventFilter(type="playbook.failed"), 10)
    then = await WatchedExecution.read(pool, execution_id, until=end.event_id)
    loop = then.loop_of("each")
    assert loop is not None
    assert (then.row.status, loop.done, loop.failed) == ("FAILED", 21, 2)
    assert "end" not in {one.step for one in then.visits.values()}
    before = await WatchedExecution.read(pool, execution_id, until=end.event_id - 1)
    assert before.row.status == "RUNNING"
    with pytest.raises(ExecutionNotFoundError):
        await WatchedExecution.read(pool, 12345)


FILTERS = {
    "all": (IterationFilter(), list(range(23))),
    "from one on": (IterationFilter(first=20), [20, 21, 22]),
    "failed": (IterationFilter("failed"), [7, 17]),
    "failed from one on": (IterationFilter("failed", first=8), [17]),
    "an error": (IterationFilter(error="item 17 IS"), [17]),
    "another error": (IterationFilter(error="100%"), []),
    "completed": (IterationFilter("completed", first=15), [15, 16, 18, 19, 20, 21, 22]),
    "open": (IterationFilter("open"), []),
}


@pytest.mark.parametrize("mode", ["fanout", "parallel", "sequential"])
async def test_iterations_by_filters(engine: Engine, settings: Settings, mode: str) -> None:
    pool = engine.runtime.pool
    text = LOOP.replace("MODE", mode).replace("FLAG", str(settings.home / "mended"))
    failed = await engine.run(playbook(text))
    execution_id = failed.execution_id
    [visit] = await visits_of_step(pool, execution_id, "each")
    assert (visit.status, visit.total, visit.is_fanout) == ("FAILED", 23, mode == "fanout")
    last = 23 if mode == "fanout" else max(one.index for one in await pages(pool, execution_id, visit)) + 1
    for name, (wanted, expected) in FILTERS.items():
        found = [one.index for one in await pages(pool, execution_id, visit, wanted)]
        assert found == [index for index in expected if index < last], name
    took = {
        one.index: one.seconds or 0.0 for one in await pages(pool, execution_id, visit, IterationFilter("completed"))
    }
    assert took[3] >= 0.3
    slow = await pages(pool, execution_id, visit, IterationFilter(slower=0.05))
    assert [one.index for one in slow] == [index for index, seconds in took.items() if seconds >= 0.05]
    slowest = await pages(pool, execution_id, visit, IterationFilter("completed", slowest_first=True))
    listed = [index for index, seconds in took.items() if seconds >= SLOW_SECONDS]
    assert [one.index for one in slowest] == sorted(listed, key=lambda index: -took[index])
    [broken] = await pages(pool, execution_id, visit, IterationFilter("failed", first=7), most=1)
    assert (broken.state, broken.attempt) == (IterationState.FAILED, 3 if mode == "fanout" else 1)
    assert "item 7 is broken" in str(broken.error)
    groups = await failure_groups(pool, execution_id, visit)
    assert [(one.number, one.first) for one in groups] == [(2 if last > 17 else 1, 7)]
    assert "item # is broken" in groups[0].error
    counted = await durations(pool, execution_id, visit, 23)
    assert sum(number for _, _, number in counted.bins) == last - groups[0].number
    events = await events_of_iteration(pool, execution_id, visit, 7)
    assert {one.current_index for one in events} == {7}
    assert events[-1].event_type == ("loop.shard.failed" if mode == "fanout" else "command.failed")

    (settings.home / "mended").touch()
    await engine.resume(execution_id)
    [visit] = await visits_of_step(pool, execution_id, "each")
    assert (visit.status, len(visit.loop_ids)) == ("COMPLETED", 2)
    assert await pages(pool, execution_id, visit, IterationFilter("failed")) == []
    assert [one.state for one in await pages(pool, execution_id, visit)] == [IterationState.COMPLETED] * 23
    types = [one.event_type for one in await events_of_command(pool, execution_id, "end", 1)]
    assert types == ["command.issued", "command.claimed", "command.completed"]


async def pages(
    pool: object, execution_id: int, visit: object, wanted: IterationFilter | None = None, most: int = 1_000
) -> list[Iteration]:
    """Returns the iterations of all pages, of four each; up to ``most``."""
    found: list[Iteration] = []
    following: IterationFilter | None = wanted or IterationFilter()
    while following is not None and len(found) < most:
        page = await list_iterations(pool, execution_id, "each", visit, following, 4)  # type: ignore[arg-type]
        found += page.rows
        following = page.next
    return found[:most]


async def test_executions_by_filters(engine: Engine, settings: Settings) -> None:
    pool = engine.runtime.pool
    steps = "workflow: [{step: start, tool: {kind: python, code: 'CODE'}}]"
    good = (await engine.run(playbook(steps.replace("CODE", "result = 1"), "good"), {"who": "Ada%"})).execution_id
    bad = (await engine.run(playbook(steps.replace("CODE", "1 / 0"), "bad"))).execution_id
    open_ = (await engine.lifecycle.create(playbook(steps.replace("CODE", "result = 1"), "good"))).id
    gone = (await engine.lifecycle.create(playbook(steps.replace("CODE", "result = 1"), "good"))).id
    await engine.lifecycle.cancel(gone)
    of_good = datetime.fromtimestamp(snowflake_milliseconds(good) / 1000, UTC)
    cases = {
        ExecutionFilter(): [gone, open_, bad, good],
        ExecutionFilter(playbook="good"): [gone, open_, good],
        ExecutionFilter(playbook="tests/bad"): [bad],
        ExecutionFilter(status="FAILED"): [bad],
        ExecutionFilter(status="RUNNING"): [open_],
        ExecutionFilter(status="CANCELLED", playbook="good"): [gone],
        ExecutionFilter(workload="ada%"): [good],
        ExecutionFilter(workload="a_a"): [],
        ExecutionFilter(parent=good): [],
        ExecutionFilter(before=bad): [good],
        ExecutionFilter(until=of_good): [],
        ExecutionFilter(since=of_good, playbook="bad"): [bad],
    }
    for wanted, expected in cases.items():
        assert [one.execution_id for one in await list_executions(pool, wanted, 10)] == expected, wanted
    [failed] = await list_executions(pool, ExecutionFilter(status="FAILED"), 10)
    assert "ZeroDivisionError" in str(failed.error)
    counts = {"RUNNING": 1, "COMPLETED": 1, "FAILED": 1, "CANCELLED": 1}
    assert await count_executions(pool, ExecutionFilter()) == counts
    assert await count_executions(pool, ExecutionFilter(playbook="bad", status="RUNNING")) == dict.fromkeys(
        counts, 0
    ) | {"FAILED": 1}


async def test_the_trail_by_filters(engine: Engine, settings: Settings) -> None:
    pool = engine.runtime.pool
    failed, _ = await failed_and_resumed(engine, settings, "fanout")
    everything = [one async for one in engine.runtime.log.events(failed.execution_id)]
    filters = [
        EventFilter(),
        EventFilter(type="loop.*"),
        EventFilter(type="step.exit"),
        EventFilter(type="step_exit"),
        EventFilter(step="each", index=7),
        EventFilter(error="BROKEN"),
        EventFilter(type="command.*", step="start"),
    ]
    for wanted in filters:
        found = [one async for page in all_filtered_events(pool, failed.execution_id, wanted, page=5) for one in page]
        expected = [one.event_id for one in everything if wanted.matches(one)]
        assert [one.event_id for one in found] == expected, wanted
    assert await filtered_events(pool, failed.execution_id, EventFilter(after=everything[-2].event_id), 5) == [
        everything[-1]
    ]


async def test_an_older_transaction_hides_nothing_from_a_page(engine: Engine, settings: Settings) -> None:
    pool = engine.runtime.pool
    async with pool.acquire() as older, older.transaction():
        await older.fetchval("SELECT pg_current_xact_id()")
        failed = await engine.run(playbook("workflow: [{step: start, tool: {kind: python, code: '1 / 0'}}]"))
        watched = await WatchedExecution.read(pool, failed.execution_id)
        assert watched.row.status == "FAILED"
        assert [one.event_type for one in watched.events][-2:] == ["playbook.failed", "workflow.failed"]
