"""A state machine over the real log: whatever order drivers and workers act in, each thing happens once."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake, command_id
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.types import COMMAND_ENDS, Event, EventType
from noetl_dagster.settings import Settings

ITEMS = 4
SOME = st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=8)
COUNTS = """
SELECT event_type, meta ->> 'command_id' AS command, count(*) FROM noetl.event
WHERE execution_id = $1 GROUP BY 1, 2
"""


class LogMachine(RuleBasedStateMachine):
    """Duplicated, reordered and repeated issues, ends and loop ends against a model of one loop."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    log: ClassVar[EventLog]

    def __init__(self) -> None:
        super().__init__()
        self.execution_id = self.log.ids.next()
        self.issued: set[int] = set()
        self.ended: dict[int, EventType] = {}
        self.loop_done = 0

    def event(self, type_: EventType, index: int | None = None) -> Event:
        meta: dict[str, Any] = {"loop_id": "1"}
        if index is not None:
            meta["command_id"] = command_id(self.execution_id, "work", 1, index)
        return Event(self.execution_id, self.log.ids.next(), type_, node_name="work", meta=meta, current_index=index)

    def append(self, *batches: list[Event]) -> list[set[int]]:
        async def race() -> list[set[int]]:
            return list(await asyncio.gather(*map(self.log.append, batches)))

        return self.loop.run_until_complete(race())

    @rule(indexes=SOME, drivers=st.integers(1, 3))
    def drivers_issue(self, indexes: list[int], drivers: int) -> None:
        order = sorted(indexes)
        batches = [[self.event(EventType.COMMAND_ISSUED, index) for index in order] for _ in range(drivers)]
        won = self.append(*batches)
        fresh = set(indexes) - self.issued
        dispatched = [
            e.current_index for batch, ids in zip(batches, won, strict=True) for e in batch if e.event_id in ids
        ]
        assert sorted(dispatched) == sorted(fresh)
        self.issued |= fresh

    @rule(indexes=SOME, failed=st.booleans())
    def workers_end(self, indexes: list[int], failed: bool) -> None:
        type_ = EventType.COMMAND_FAILED if failed else EventType.COMMAND_COMPLETED
        ends = [self.event(type_, index) for index in indexes if index in self.issued]
        if not ends:
            return
        [won] = self.append(ends)
        fresh = {index for index in indexes if index in self.issued} - self.ended.keys()
        assert {e.current_index for e in ends if e.event_id in won} == fresh
        self.ended |= dict.fromkeys(fresh, type_)

    @rule(drivers=st.integers(1, 3))
    def drivers_end_the_loop(self, drivers: int) -> None:
        if len(self.ended) < ITEMS:
            return
        won = self.append(*([self.event(EventType.LOOP_DONE)] for _ in range(drivers)))
        assert sum(map(len, won)) == (0 if self.loop_done else 1)
        self.loop_done = 1

    @rule()
    def the_same_event_is_sent_again(self) -> None:
        """A writer that lost the answer of its commit sends the very same event again."""
        event = self.event(EventType.WARNING)
        assert self.append([event]) == [{event.event_id}]
        assert self.append([event]) == [set()]

    @invariant()
    def the_log_agrees(self) -> None:
        rows = self.loop.run_until_complete(self.log.pool.fetch(COUNTS, self.execution_id))
        counts = {(row["event_type"], row["command"]): row["count"] for row in rows}
        issued = [n for (type_, _), n in counts.items() if type_ == EventType.COMMAND_ISSUED]
        ends = [n for (type_, _), n in counts.items() if type_ in COMMAND_ENDS]
        assert issued == [1] * len(self.issued)
        assert ends == [1] * len(self.ended)
        assert counts.get((EventType.LOOP_DONE, None), 0) == self.loop_done


@pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_the_order_each_thing_happens_once(settings: Settings, examples: int) -> None:
    assert settings.db_url is not None
    loop = asyncio.new_event_loop()
    pool = loop.run_until_complete(open_pool(settings.db_url, size=4))
    LogMachine.loop, LogMachine.log = loop, EventLog(pool, Snowflake(3))
    try:
        run_state_machine_as_test(
            LogMachine,
            settings=hypothesis_settings(
                max_examples=examples,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.run_until_complete(pool.close())
        loop.close()
