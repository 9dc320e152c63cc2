"""Workers and API processes are killed in the middle of batches, over and over: each command ends once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import asyncpg
import psutil
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import Spawn, control_plane
from tests.proxy import cutting
from tests.redelivery import redelivered_after
from tests.service.conftest import Process, Start
from tests.waiting import HERE, ended, until
from tests.whole import Fan, held_rows, held_up, warm

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
                return len(await held_rows(pool, victim)) > 3

            await until(is_ahead, "claims ahead")
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


@pytest.mark.parametrize("processes", [3])
@pytest.mark.parametrize(("items", "kills"), [(300, 1), pytest.param(6_000, 12, marks=LONG)])
async def test_claims_go_on_when_api_processes_are_killed(
    settings: Settings, start: Start, tmp_path: Path, processes: int, items: int, kills: int
) -> None:
    await redelivered_after(settings, REDELIVERY_SECONDS)
    dice = random.Random(kills)

    def serve(port: str) -> tuple[Process, str]:
        process = start(settings, "serve", "--port", port, "--processes", str(processes))
        return process, process.until_says(r"HTTP API on (http://\S+)\n")[1]

    def serving() -> list[int]:
        if processes == 1:
            return [service.popen.pid]
        children = psutil.Process(service.popen.pid).children()
        return [child.pid for child in children if not ended(child.pid)]

    service, url = await asyncio.to_thread(serve, "0")
    own = settings.model_copy(update={"server_url": url, "event_transport": EventTransport.NATS})
    engine = await Engine.open(own.model_copy(update={"event_transport": EventTransport.DIRECT}))
    async with working(own, "w1", worker_slots=3), working(own, "w2", worker_slots=3):
        await warm(engine)
        fan = await Fan.start(engine, tmp_path, items)
        for kill in range(kills):
            await fan.until_done((kill + 1) * items // (kills + 2))
            assert not fan.is_over, "it was to be killed in the middle"
            os.kill(dice.choice(await until(serving, "a process that serves")), signal.SIGKILL)
            if processes == 1:
                await asyncio.to_thread(service.popen.wait)
                service, _ = await asyncio.to_thread(serve, url.rpartition(":")[2])
        await fan.is_whole()
    await engine.close()


CLAIM_WAITS = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND {HERE}"
WORKERS_AT_ONCE = """
SELECT max(workers) FROM (
    SELECT count(DISTINCT worker_id) AS workers FROM noetl.event
    WHERE execution_id = $1 AND event_type = 'command.claimed' GROUP BY xact_id) AS statements
"""


@pytest.mark.parametrize("committed", [False, True])
async def test_an_api_process_is_killed_with_the_claims_of_many_workers(
    settings: Settings, start: Start, tmp_path: Path, committed: bool
) -> None:
    """It dies while their statement is made, or when that is committed and no worker has its answer."""
    await redelivered_after(settings, REDELIVERY_SECONDS)
    asked, lost = 0, False

    def swallows(request: bytes) -> bool:
        nonlocal asked
        claims = request.startswith(b"POST /api/commands/claim ")
        asked += claims
        return claims and lost

    async def serve(port: str) -> tuple[Process, str]:
        process = start(settings, "serve", "--port", port)
        return process, (await asyncio.to_thread(process.until_says, r"HTTP API on (http://\S+)\n"))[1]

    service, url = await serve("0")
    own = settings.model_copy(update={"server_url": url, "event_transport": EventTransport.NATS})
    engine = await Engine.open(own.model_copy(update={"event_transport": EventTransport.DIRECT}))
    pool, claimed = engine.runtime.pool, "SELECT count(DISTINCT worker_id) FROM noetl.queue WHERE status = 'leased'"
    holder = await asyncpg.connect(settings.db_url)
    async with contextlib.AsyncExitStack() as stack:
        far = own.model_copy(update={"server_url": await stack.enter_async_context(cutting(url, swallows))})
        for number in range(8):
            await stack.enter_async_context(working(far, f"w{number}", worker_slots=1))
        await pool.execute(held_up("NEW.event_type = 'command.claimed'"))
        await holder.execute("SELECT pg_advisory_lock(1, 1)")
        asked, lost = 0, True
        fan = await Fan.start(engine, tmp_path, 60, seconds=0.06)
        await until(lambda: asked >= 8, "every worker to claim")
        await until(lambda: pool.fetchval(CLAIM_WAITS), "a statement")
        if committed:
            await holder.execute("SELECT pg_advisory_unlock(1, 1)")

            async def all_are_claimed() -> bool:
                return bool(await pool.fetchval(claimed) == 8)

            await until(all_are_claimed, "the claims of all to be committed")
        service.popen.kill()
        await asyncio.to_thread(service.popen.wait)
        lost = False
        await holder.close()  # its lock goes with it
        assert not fan.begun
        await serve(url.rpartition(":")[2])
        await fan.is_whole()
        if committed:
            assert await pool.fetchval(WORKERS_AT_ONCE, fan.execution_id) > 1
    await engine.close()
