"""Workers and API processes are killed in the middle of batches, over and over: each command ends once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import Spawn, control_plane
from tests.redelivery import redelivered_after
from tests.service.conftest import Start
from tests.waiting import ended, until
from tests.whole import Fan, held_rows, warm

LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
REDELIVERY_SECONDS = 2.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"worker_heartbeat_seconds": 2.0, "command_heartbeat_timeout_seconds": 600.0})


@pytest.mark.parametrize(("items", "kills"), [(300, 1), pytest.param(6_000, 8, marks=LONG)])
async def test_others_do_what_a_killed_worker_had_claimed(
    settings: Settings, spawn: Spawn, tmp_path: Path, items: int, kills: int
) -> None:
    async with control_plane(settings, EventTransport.NATS) as own:
        engine = await Engine.open(own)
        pool = engine.runtime.pool
        changes = {"event_transport": EventTransport.NATS, "server_url": own.server_url}
        workers = {name: spawn(name, "--slots", "3", **changes) for name in ("w0", "w1")}
        ready = "SELECT count(*) >= 2 FROM noetl.runtime WHERE status = 'ready'"
        await until(lambda: pool.fetchval(ready), "the workers")
        await warm(engine)
        fan = await Fan.start(engine, tmp_path, items)
        had: set[int] = set()
        for kill in range(kills):
            await fan.until_done((kill + 1) * items // (kills + 2))
            victim = f"w{kill}"

            async def is_ahead(victim: str = victim) -> bool:
                assert not fan.is_over, "it was to be killed in the middle"
                workers[victim].send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.2)  # the ends that it has sent arrive
                if len(await held_rows(pool, victim)) > 3 and await fan.held_by(victim):
                    return True
                workers[victim].send_signal(signal.SIGCONT)
                return False

            await until(is_ahead, "claims ahead of a worker that is stopped")
            workers[victim].kill()
            workers[victim].wait()
            held = await fan.held_by(victim)
            assert held
            had |= held
            if kill + 1 < kills:
                workers[f"w{kill + 2}"] = spawn(f"w{kill + 2}", "--slots", "3", **changes)
        found = await fan.is_whole(again=had)
        assert found["command.claimed"] > items + 1
        await engine.close()


@pytest.mark.parametrize(("items", "kills"), [(150, 1), pytest.param(6_000, 12, marks=LONG)])
async def test_claims_go_on_when_api_processes_are_killed(
    settings: Settings, start: Start, tmp_path: Path, items: int, kills: int
) -> None:
    await redelivered_after(settings, REDELIVERY_SECONDS)
    dice = random.Random(kills)

    def serving() -> list[int]:
        children = psutil.Process(service.popen.pid).children()
        return [child.pid for child in children if not ended(child.pid)]

    service = start(settings, "serve", "--port", "0", "--processes", "2")
    url = (await asyncio.to_thread(service.until_says, r"HTTP API on (http://\S+)\n"))[1]
    own = settings.model_copy(update={"server_url": url, "event_transport": EventTransport.NATS})
    engine = await Engine.open(own.model_copy(update={"event_transport": EventTransport.DIRECT}))
    async with working(own, "w1", worker_slots=3), working(own, "w2", worker_slots=3):
        await warm(engine)
        fan = await Fan.start(engine, tmp_path, items)
        for kill in range(kills):
            await fan.until_done((kill + 1) * items // (kills + 2))
            assert not fan.is_over, "it was to be killed in the middle"
            os.kill(dice.choice(await until(serving, "a process that serves")), signal.SIGKILL)
        await fan.is_whole()
    await engine.close()
