"""Shared items: each is handed out once, slots are spread, and the items of a lost helper process come back."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.helper import HelperWork, RemoteItems
from noetl_dagster.engine.sharing import (
    CANCELLED,
    LARGEST,
    Message,
    Range,
    Ranges,
    SharedItems,
    SharedLoop,
    Tally,
)

LOOP = SharedLoop(1, "fan", 1, "loop", True)


class Peer:
    """A helper that only listens."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def kill(self) -> None:
        raise AssertionError("nobody is to be killed here")

    @property
    def slots(self) -> int:
        return sum(message["slots"] for message in self.heard if message["do"] == "work")


async def test_more_helpers_than_wanted_get_no_more_slots_than_there_are() -> None:
    items = SharedItems(LOOP, 0, 1_000, 10, 2)
    peers = [Peer() for _ in range(3)]
    for peer in peers:
        items.add_helper(peer, 2, at_once=True)

    assert [peer.slots for peer in peers] == [5, 0, 0]


async def test_what_a_helper_did_not_end_well_comes_back() -> None:
    items = SharedItems(LOOP, 0, 100, 10, 2)
    peer = Peer()
    items.add_helper(peer, 2, at_once=True)
    items.send_items(peer)
    [given] = [message["items"] for message in peer.heard if message["do"] == "items"]
    items.helper_ended(peer, Tally(), well=False)
    seen: list[Range] = []
    working: list[int] = []

    async def worker() -> None:
        working.append(1)
        while (found := await items.take()) is not None:
            seen.append(found)
            await asyncio.sleep(0)

    await items.run(worker)

    assert sorted(index for one in seen for index in range(one.start, one.stop)) == list(range(100))
    again = {index for one in seen if one.again for index in range(one.start, one.stop)}
    assert again == set(range(given["start"], given["stop"]))
    assert len(working) == 10, "its slots came back once"


class Listener:
    """The driver's end, which only listens."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)


async def test_an_answer_to_who_was_cancelled_ends_nothing() -> None:
    items = RemoteItems(Listener(), 1)  # type: ignore[arg-type]
    asking = asyncio.create_task(items.take())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)

    items.handle({"do": "items", "items": {"start": 0, "stop": 5, "again": False}})

    assert asking.cancelled()


async def test_work_that_ends_with_its_helper_is_not_told_as_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(*given: object) -> Tally:
        await asyncio.Event().wait()
        return Tally()

    monkeypatch.setattr(HelperWork, "_run", for_ever)
    driver = Listener()
    helper = HelperWork(driver, engine.runtime)  # type: ignore[arg-type]
    helper.handle({"do": "open", "range": 7, "loop": asdict(LOOP)})
    await asyncio.sleep(0)
    await helper.cancel()

    assert driver.heard == [{"do": "over", "range": 7, "error": CANCELLED, "done": 0, "failed": 0}]


@given(st.integers(0, 5_000), st.integers(0, 3_000), st.lists(st.integers(1, 9), min_size=1))
def test_each_item_is_handed_out_once(start: int, count: int, sharers: list[int]) -> None:
    ranges = Ranges(start, start + count)
    taken: list[int] = []
    turn = 0
    while (found := ranges.take(sharers[turn % len(sharers)])) is not None:
        assert 0 < len(found) <= LARGEST
        taken.extend(range(found.start, found.stop))
        turn += 1

    assert taken == list(range(start, start + count))


def test_pieces_become_smaller_so_that_all_end_together() -> None:
    ranges = Ranges(0, 1_000)
    sizes = []
    while (found := ranges.take(2)) is not None:
        sizes.append(len(found))

    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (250, 1)


def test_what_comes_back_is_marked() -> None:
    ranges = Ranges(0, 10)
    first = ranges.take(1)
    assert first == Range(0, 10)

    ranges.give_back([Range(3, 7)])

    assert len(ranges) == 4
    assert ranges.take(1) == Range(3, 7, again=True)
