"""What a worker claims and does not begin is soon somebody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import Spawn, control_plane
from tests.waiting import until
from tests.whole import Fan, held_rows, warm

ITEMS = 24
SOON_SECONDS = 30.0
"""A worker that is not heard of is missed after a minute, a lease lasts ten."""


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands count as short on a busy machine too, and claims are kept until a test says otherwise."""
    monkeypatch.setattr("noetl_dagster.pool_worker.claimer.AHEAD_SECONDS", 1.0)
    monkeypatch.setattr("noetl_dagster.pool_worker.claimer.KEPT_SECONDS", 1000.0)


async def claims_ahead(engine: Engine, worker_id: str, folder: Path, items: int = ITEMS) -> Fan:
    """Has a worker of two slots claim every item of a fan-out whose items turn out to be long."""
    await warm(engine)
    fan = await Fan.start(engine, folder, items, held=items)

    async def has_all() -> bool:
        return len(await held_rows(engine.runtime.pool, worker_id)) == items and len(fan.begun) == 2

    await until(has_all, "the claims of all items")
    return fan


async def others_have(fan: Fan, count: int) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        await until(lambda: len(fan.begun) == count, "others to run what was given back")


async def test_a_worker_that_stops_hands_over_at_once(settings: Settings, tmp_path: Path) -> None:
    async with control_plane(settings, EventTransport.DIRECT) as own:
        engine = await Engine.open(own)
        async with working(own, "first", worker_slots=2) as first:
            fan = await claims_ahead(engine, "first", tmp_path)
            async with working(own, "second", worker_slots=ITEMS):
                stopping = asyncio.create_task(first._drain())
                await others_have(fan, ITEMS)
                assert len(await held_rows(engine.runtime.pool, "first")) == 2
                fan.go()
                await stopping
                found = await fan.is_whole()
        assert found["command.claimed"] == 2 * ITEMS - 2 + 1
        await engine.close()


async def test_a_worker_whose_slots_are_blocked_gives_back_what_it_claimed_ahead(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_plane(settings, EventTransport.HTTP) as own:
        engine = await Engine.open(own)
        async with working(own, "first", worker_slots=2):
            fan = await claims_ahead(engine, "first", tmp_path)
            monkeypatch.setattr("noetl_dagster.pool_worker.claimer.KEPT_SECONDS", 1.0)
            async with working(own, "second", worker_slots=ITEMS):
                await others_have(fan, ITEMS)
                assert len(await held_rows(engine.runtime.pool, "first")) == 2
                fan.go()
                await fan.is_whole()
        await engine.close()


async def test_a_worker_that_comes_back_under_its_name_does_not_keep_what_it_had(
    settings: Settings, spawn: Spawn, tmp_path: Path
) -> None:
    """A container that is killed and started again has the same host name, and its process the same number."""
    own = settings.model_copy(update={"event_transport": EventTransport.DIRECT})
    engine = await Engine.open(own)
    first = spawn("same", "--slots", "2", event_transport=EventTransport.DIRECT)
    fan = await Fan.start(engine, tmp_path, 6, held=6)
    await until(lambda: len(fan.begun) == 2, "commands that run")
    first.kill()
    first.wait()
    held = await fan.held_by("same")
    async with working(own, "same", worker_slots=6):
        await others_have(fan, 6 + len(held))
        fan.go()
        await fan.is_whole(again=held)
    await engine.close()
