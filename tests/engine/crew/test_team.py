"""Who has how much of a team's work: places, ranges, and what comes back."""

from __future__ import annotations

import asyncio

import pytest

from noetl_dagster.engine.crew.ranges import Range
from noetl_dagster.engine.crew.team import CANCELLED, Job, Tally, Team
from noetl_dagster.engine.crew.wire import Message
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.helper import work
from noetl_dagster.engine.helper.work import RemoteShare
from noetl_dagster.process.event_loop import cancel_and_wait

JOB = Job(1, "fan", 1, "loop", True)


class Mate:
    """A helper that only listens."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def kill(self) -> None:
        raise AssertionError("nobody is to be killed here")

    @property
    def places(self) -> int:
        return sum(message["places"] for message in self.heard if message["do"] == "work")


async def test_more_helpers_than_wanted_get_no_more_places_than_there_are() -> None:
    team = Team(JOB, 0, 1_000, 10, 2)
    mates = [Mate() for _ in range(3)]
    for mate in mates:
        team.join(mate, 2, at_once=True)

    assert [mate.places for mate in mates] == [5, 0, 0]


async def test_what_a_helper_did_not_end_well_comes_back() -> None:
    team = Team(JOB, 0, 100, 10, 2)
    mate = Mate()
    team.join(mate, 2, at_once=True)
    team.asked(mate)
    [given] = [message for message in mate.heard if message["do"] == "range"]
    team.ended(mate, Tally(), well=False)
    seen: list[Range] = []
    working: list[int] = []

    async def worker() -> None:
        working.append(1)
        while (found := await team.take()) is not None:
            seen.append(found)
            await asyncio.sleep(0)

    await team.run(worker)

    assert sorted(index for one in seen for index in range(one.start, one.stop)) == list(range(100))
    again = {index for one in seen if one.again for index in range(one.start, one.stop)}
    assert again == set(range(given["start"], given["stop"]))
    assert len(working) == 10, "its places came back once"


class Listener:
    """The driver's end, which only listens."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)


async def test_an_answer_to_who_was_cancelled_ends_nothing() -> None:
    share = RemoteShare(Listener(), 1)  # type: ignore[arg-type]
    asking = asyncio.create_task(share.take())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)

    share.heard({"do": "range", "start": 0, "stop": 5, "again": False})

    assert asking.cancelled()


async def test_work_that_ends_with_its_helper_is_not_told_as_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(*given: object) -> Tally:
        await asyncio.Event().wait()
        return Tally()

    monkeypatch.setattr(work._Work, "_run", for_ever)
    driver = Listener()
    helper = work._Work(driver, engine.runtime)  # type: ignore[arg-type]
    helper._hear({"do": "open", "team": 7})
    await asyncio.sleep(0)
    await cancel_and_wait(*helper._tasks.values())

    assert driver.heard == [{"do": "over", "team": 7, "error": CANCELLED, "done": 0, "failed": 0}]
