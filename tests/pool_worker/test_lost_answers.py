"""Requests that were done and whose answers were lost: workers ask again, and nobody is left with a claim."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import control_plane
from tests.proxy import cutting
from tests.waiting import until
from tests.whole import Fan, warm

CLAIM, RELEASE = "/api/commands/claim", "/api/commands/release"


def path_of(request: bytes) -> str:
    return request.split(b" ", 2)[1].decode()


@pytest.mark.parametrize("items", [80, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_answers_that_are_lost_cost_no_command(settings: Settings, tmp_path: Path, items: int) -> None:
    dice, cut = random.Random(items), Counter[str]()

    def swallows(request: bytes) -> bool:
        lost = dice.random() < {CLAIM: 0.4, RELEASE: 0.4}.get(path_of(request), 0.1)
        cut[path_of(request)] += lost
        return lost

    async with control_plane(settings, EventTransport.HTTP) as own, cutting(own.server_url, swallows) as url:
        engine = await Engine.open(own)
        far = own.model_copy(update={"server_url": url})
        async with working(far, "w1", worker_slots=4), working(far, "w2", worker_slots=3):
            fan = await Fan.start(engine, tmp_path, items)
            await fan.is_whole()
        assert cut[CLAIM] > 2
        await engine.close()


async def test_what_cannot_be_given_back_now_is_given_back_later(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API is away for longer than a worker waits for it, just when it has claimed too much."""
    monkeypatch.setattr("noetl_dagster.pool_worker.control.RELEASE_SECONDS", 0.1)
    refused, refuses = 0, True

    def swallows(request: bytes) -> bool:
        nonlocal refused
        if refuses and path_of(request) == RELEASE:
            refused += 1
            raise ConnectionAbortedError
        return False

    async with control_plane(settings, EventTransport.HTTP) as own, cutting(own.server_url, swallows) as url:
        engine = await Engine.open(own)
        async with working(own.model_copy(update={"server_url": url}), "first", worker_slots=2):
            await warm(engine)
            fan = await Fan.start(engine, tmp_path, 20, held=20)
            await until(lambda: refused > 4, "claims that cannot be given back")
            async with working(own, "second", worker_slots=20):
                refuses = False
                async with asyncio.timeout(30):
                    await until(lambda: len(fan.begun) == 20, "the others to have them")
                fan.go()
                await fan.is_whole()
        await engine.close()
