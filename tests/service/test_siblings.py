"""``serve --processes``: one address, and no process that must not die."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import asyncpg
import httpx
import psutil
import pytest
from pydantic import SecretStr

from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.wire import encode_batch, encode_event
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import IDS, ended, hold, started
from tests.service.conftest import Process, Start, samples
from tests.waiting import ended as is_gone
from tests.waiting import until, until_now

PROCESSES = 2
SENDERS = 4
BATCHES = 24


def children(process: Process) -> list[int]:
    """The processes that serve now."""
    started = psutil.Process(process.popen.pid).children()
    return [one.pid for one in started if not is_gone(one.pid) and "spawn_main" in " ".join(one.cmdline())]


def serving(start: Start, settings: Settings) -> tuple[Process, str]:
    """Starts several processes; gives their parent and their address."""
    parent = start(settings, "serve", "--port", "0", "--processes", str(PROCESSES))
    url = parent.until_says(r"HTTP API on (http://\S+)\n")[1]
    until_now(lambda: len(children(parent)) == PROCESSES, "all processes")
    return parent, url


@pytest.fixture
async def execution_id(pool: asyncpg.Pool) -> int:
    event = started()
    await EventLog(pool, IDS).append([event])
    return event.execution_id


async def test_events_lose_nothing_while_processes_are_killed(
    settings: Settings, start: Start, pool: asyncpg.Pool, execution_id: int
) -> None:
    parent, url = await asyncio.to_thread(serving, start, settings)
    await hold(pool, execution_id, SENDERS)
    first = children(parent)
    sent: set[int] = set()

    async def send(number: int) -> None:
        client = ApiClient(settings.model_copy(update={"server_url": url}))
        for index in range(BATCHES):
            beats = [ended(execution_id, number, event_type=EventType.COMMAND_HEARTBEAT, result=None) for _ in range(3)]
            content = encode_batch([encode_event(event) for event in beats])
            answer = await client.request("POST", "/api/events/batch", content=content)
            assert answer.status == 202, answer.text
            sent.update(event.event_id for event in beats)
            if number < len(first) - 1 and index == BATCHES // 3 * (number + 1):
                psutil.Process(first[number]).kill()
        await client.close()

    await asyncio.gather(*(send(number) for number in range(SENDERS)))
    rows = await pool.fetch(
        "SELECT event_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.heartbeat'",
        execution_id,
    )
    assert len(sent) == SENDERS * BATCHES * 3
    assert sorted(row["event_id"] for row in rows) == sorted(sent)
    await until(lambda: len(children(parent)) == PROCESSES, "those that take the places of the dead")
    assert len(set(children(parent)) & set(first)) == 1
    assert parent.said().count("HTTP API on") == 1

    async def counted(method: str, route: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=90, verify=False) as client:  # whichever process takes it
            found = samples((await client.get("/metrics")).text)
        labels = ("method", method), ("route", route), ("status", "200" if method == "GET" else "202")
        return found.get(("noetl_http_requests_total", *labels), 0)

    # the dead had counted too, all but what each had in hand
    assert await counted("POST", "/api/events/batch") >= SENDERS * BATCHES - 2 * SENDERS
    for _ in range(30):
        async with httpx.AsyncClient(base_url=url, timeout=90, verify=False) as client:
            assert (await client.get("/health")).is_success

    async def all_counted() -> bool:
        return await counted("GET", "/health") == 30

    await until(all_counted, "the sum over all processes")
    last = children(parent)
    for pid in last:
        psutil.Process(pid).kill()
    await until(lambda: all(map(is_gone, last)), "the end of all")
    async with httpx.AsyncClient(base_url=url, timeout=90, verify=False) as client:
        assert (await client.get("/health")).is_success, "who asks while nobody serves waits"
    await asyncio.to_thread(ends_with_its_children, parent, url, signal.SIGTERM)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_its_parent(settings: Settings, start: Start, number: signal.Signals) -> None:
    ends_with_its_children(*serving(start, settings), number)


def ends_with_its_children(parent: Process, url: str, number: signal.Signals) -> None:
    serve = children(parent)
    folder = Path(psutil.Process(serve[0]).environ()["PROMETHEUS_MULTIPROC_DIR"])
    parent.popen.send_signal(number)
    code = parent.popen.wait()
    until_now(lambda: all(map(is_gone, serve)), "the end of all processes")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    if number != signal.SIGKILL:
        assert "Traceback" not in parent.said()
        assert code == 0
        assert not folder.exists()


def test_what_stops_the_first_process_is_said_once(settings: Settings, start: Start) -> None:
    broken = settings.model_copy(update={"service_tokens": SecretStr("no json")})
    parent = start(broken, "serve", "--port", "0", "--processes", str(PROCESSES))
    assert parent.popen.wait() == 1
    assert parent.said().count("NOETL_SERVICE_TOKENS is not JSON") == 1
