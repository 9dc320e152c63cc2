"""Attacks on the API while its parts are killed: each stays refused, and no answer shows the inside of the service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import SecretStr

from noetl_dagster import embedded
from noetl_dagster.embedded.servers import ServiceName
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import EventType
from noetl_dagster.settings import Settings
from noetl_dagster.values import encode_json
from tests.events.transport.conftest import IDS, ended, hold, started
from tests.service.conftest import Process, Start, start
from tests.waiting import until

__all__ = ["start"]

pytestmark = pytest.mark.chaos

TOKENS = {"one": ["worker:w1"], "two": ["worker:w2"], "gpu": ["pool:gpu"], "r": ["reader"]}
REFUSED = {400, 401, 403, 404, 409, 413, 415, 422, 429}
UNAVAILABLE = 503
ROUNDS = 12

STATE = """
SELECT (SELECT count(*) FROM noetl.event), (SELECT count(*) FROM noetl.queue WHERE status = 'leased' AND worker_id = 'w1'),
       (SELECT count(*) FROM noetl.execution), (SELECT count(*) FROM noetl.catalog)
"""

Attack = tuple[str, str, str, Any]


def attacks(execution_id: int) -> list[Attack]:
    """Returns token, method, path and body of requests of which none may be served."""
    own, claim = ended(execution_id, 0), {"event_ids": [str(IDS.next())]}
    lies = [replace(own, worker_id="w2"), replace(own, node_name="other"), replace(own, meta=own.meta | {"attempt": 2})]
    lies += [replace(own, event_type=EventType.STEP_ENTER), replace(own, parent_event_id=5)]
    found: list[Attack] = [
        ("two" if one.worker_id == "w2" else "one", "POST", "events", message_of(one)) for one in lies
    ]
    found += [(token, "POST", "events", message_of(own)) for token in ("two", "gpu", "r", "none", "")]
    found += [
        ("two", "POST", "commands/claim", claim | {"worker_id": "w1"}),
        ("two", "POST", "commands/claim", claim | {"worker_id": "w2", "pool": "gpu"}),
        ("two", "POST", "commands/release", {"worker_id": "w1", "event_ids": ["1"]}),
        ("gpu", "POST", "workers", {"worker_id": "w1", "status": "stopped"}),
        ("two", "GET", f"executions/{execution_id}/lifecycle", None),
        ("two", "GET", f"commands/{own.meta['command_id']}", None),
        ("gpu", "GET", f"results/resolve?ref=noetl://execution/{execution_id}/result/a/b", None),
        ("one", "POST", "executions/execute", {"path": "x"}),
        ("r", "POST", f"executions/{execution_id}/cancel", {}),
        ("one", "POST", "catalog", {"content": "x"}),
        ("r", "POST", "commands/claim", claim | {"worker_id": "w1"}),
        ("", "GET", "executions", None),
        ("", "GET", "../metrics", None),
        ("one", "POST", "events", {"execution_id": "x"}),
        ("one", "POST", "events", b"\xff"),
    ]
    return found


async def attacked(client: httpx.AsyncClient, attack: Attack, statuses: Counter[str]) -> None:
    """Sends one request. It is refused, or there is no answer at the moment."""
    token, method, path, body = attack
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    content = body if isinstance(body, bytes) else None if body is None else encode_json(body)
    try:
        answer = await client.request(method, f"/api/{path}", content=content, headers=headers)
    except httpx.TransportError as error:
        statuses[type(error).__name__] += 1
        return
    statuses[str(answer.status_code)] += 1
    assert answer.status_code in REFUSED | {UNAVAILABLE}, (attack, answer.status_code, answer.text[:500])
    assert answer.headers["content-type"] == "application/problem+json", (attack, answer.text[:200])
    detail = str(answer.json()["detail"])
    for inside in ("Traceback", "asyncpg", "SELECT", "postgresql://", "nats://", 'File "'):
        assert inside not in detail, (attack, detail)


async def kill_server(settings: Settings, name: ServiceName) -> None:
    """Kills a server, and starts it again after a moment in which there is none."""
    pid = read_state(settings.home).services[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(embedded.ensure, settings.model_copy(update={"db_url": None, "nats_url": None}),
                            only=[ServiceName.POSTGRES, ServiceName.NATS])  # fmt: skip


async def test_attacks_stay_refused(own_services: Settings, start: Start) -> None:
    assert own_services.db_url is not None
    await apply_schema(own_services.db_url)
    pool = await open_pool(own_services.db_url, size=2)
    first = started()
    await EventLog(pool, IDS).append([first])
    await hold(pool, first.execution_id, 10)
    await pool.execute("UPDATE noetl.queue SET context = context || jsonb_build_object('step', 'step')")
    before = await pool.fetchrow(STATE)
    own = own_services.model_copy(update={"service_tokens": SecretStr(json.dumps(TOKENS))})
    service: Process = await asyncio.to_thread(start, own, "serve", "--port", "0")
    url = (await asyncio.to_thread(service.until_says, r"http://\S+"))[0]
    statuses: Counter[str] = Counter()
    done = asyncio.Event()

    async def attack_for_long(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            for attack in attacks(first.execution_id):
                await attacked(client, attack, statuses)

    async def kill_service() -> None:
        nonlocal service
        service.popen.send_signal(signal.SIGKILL)
        await asyncio.to_thread(service.popen.wait)
        service = await asyncio.to_thread(start, own, "serve", "--port", url.rpartition(":")[2])
        await asyncio.to_thread(service.until_says, "HTTP API on")

    async def answers(client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    kills: list[Callable[[], Awaitable[None]]] = [
        kill_service,
        lambda: kill_server(own_services, ServiceName.POSTGRES),
        lambda: kill_server(own_services, ServiceName.NATS),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        attacking = [asyncio.create_task(attack_for_long(client)) for _ in range(3)]
        try:
            for number in range(ROUNDS):
                await kills[number % len(kills)]()
                await until(lambda: answers(client), "the API to be ready again")
        finally:
            done.set()
            await asyncio.gather(*attacking)
        statuses.clear()
        for attack in attacks(first.execution_id):
            await attacked(client, attack, statuses)
        assert statuses.keys() <= {str(status) for status in REFUSED}
    await pool.close()
    checked = await asyncpg.connect(own_services.db_url)
    assert await checked.fetchrow(STATE) == before
    await checked.close()
