"""Playbooks that the HTTP API receives are checked in processes with limits, while the API answers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from noetl_dagster.errors import PlaybookError
from noetl_dagster.service import checking
from noetl_dagster.service.checking import PlaybookChecker
from noetl_dagster.settings import Settings, get_settings
from tests.playbook.playbooks import HEAD
from tests.security.test_playbook_size import ATTACKS
from tests.service.conftest import Service, serving

STEP = "workflow:\n- step: start\n  loop: {in: [1], iterator: x}\n  tool: {kind: noop}\n  spec: {timeout: 'TEMPLATE'}\n"
SLOW = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def with_timeout(template: str) -> str:
    return HEAD + STEP.replace("TEMPLATE", template)


def many(template: str, number: int = 40) -> str:
    steps = "".join(
        f"- step: s{index}\n  tool: {{kind: noop}}\n  spec: {{timeout: '{template}'}}\n" for index in range(number)
    )
    return HEAD + "workflow:\n" + steps


@asynccontextmanager
async def checker_of(**changes: Any) -> AsyncIterator[PlaybookChecker]:
    checker = PlaybookChecker(get_settings().model_copy(update=changes))
    yield checker
    await checker.close()


async def refusal(checker: PlaybookChecker, content: str) -> str:
    with pytest.raises(PlaybookError) as refused:
        await checker.draft(content)
    return str(refused.value)


async def test_a_text_that_takes_too_long_ends_its_process_only() -> None:
    async with checker_of(check_seconds=1.0) as checker:
        await checker.draft(with_timeout("{{ 5 }}"))
        first = checker._idle[0].pid
        assert "NOETL_CHECK_SECONDS" in await refusal(checker, many(SLOW))
        assert not checker._idle
        assert not psutil.pid_exists(first)
        assert (await checker.draft(with_timeout("{{ 5 }}"))).path


async def test_a_text_that_takes_too_much_memory_ends_its_process_only() -> None:
    async with checker_of(check_bytes=140 * 1024**2) as checker:
        await checker.draft(with_timeout("{{ 5 }}"))
        first = checker._idle[0].pid
        large = HEAD + "workload: {a: [" + "[]," * 150_000 + "]}\n" + "workflow: [{step: a, tool: {kind: noop}}]\n"
        assert "NOETL_CHECK_BYTES" in await refusal(checker, large)
        assert not psutil.pid_exists(first)
        assert (await checker.draft(with_timeout("{{ 5 }}"))).path


async def test_a_process_that_dies_is_replaced() -> None:
    async with checker_of() as checker:
        await checker.draft(with_timeout("{{ 5 }}"))
        os.kill(checker._idle[0].pid, signal.SIGSEGV)
        assert "SIGSEGV" in await refusal(checker, with_timeout("{{ 5 }}"))
        assert (await checker.draft(with_timeout("{{ 5 }}"))).payload["kind"] == "Playbook"


async def test_a_checking_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_CREDENTIAL_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with checker_of() as checker:
        await checker.draft(with_timeout("{{ 5 }}"))
        environment = psutil.Process(checker._idle[0].pid).environ()
    assert "secret" not in environment.values()
    assert "NOETL_PLAYBOOK_BYTES" in environment


async def test_a_cancelled_request_ends_its_process() -> None:
    async with checker_of() as checker:
        await checker.draft(with_timeout("{{ 5 }}"))
        asking = asyncio.create_task(checker.draft(many(SLOW)))
        await asyncio.sleep(0.3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not checker._idle
        assert checker._slots._value == checking.PROCESSES


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with serving(settings, check_seconds=3.0) as running:
        yield running


async def test_the_api_refuses_attacks_and_stays_responsive(service: Service) -> None:
    client, slowest = service.client, 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    bodies = [HEAD + ATTACKS[name][0] for name in ("brackets", "aliases in workload", "aliases in input", "merges")]
    bodies += [with_timeout("{{ " + "(" * 90 + "1" + ")" * 90 + " }}")]
    for body in bodies:
        answer = await client.post("/api/catalog", json={"content": body})
        assert answer.status_code == 422, answer.text
        assert any(limit in answer.json()["detail"] for limit in ("values", "nested"))
    answer = await client.post("/api/catalog", json={"content": with_timeout("{{ 9 ** (9 ** 9) }}")})
    assert answer.status_code == 201  # a warning: the setting may be known later
    name = answer.json()["version"]["path"]

    settled = many(SLOW.replace("100000", "workload.n") + "5", 40) + "workload: {n: 3}\n"
    assert (await client.post("/api/catalog", json={"content": settled})).status_code == 201
    answer = await client.post("/api/executions/execute", json={"path": name, "workload": {"n": 100_000}})
    assert answer.status_code == 422
    assert "NOETL_CHECK_SECONDS" in answer.json()["detail"]

    deep: Any = 1
    for _ in range(250):
        deep = [deep]
    answer = await client.post("/api/executions/execute", json={"path": name, "workload": {"n": 1, "deep": deep}})
    assert answer.status_code == 422
    assert "deeper than 200 levels" in answer.json()["detail"]
    content = f'{{"path": "{name}", "workload": {{"n": {"[" * 50_000}1{"]" * 50_000}}}}}'
    headers = {"content-type": "application/json"}
    answer = await client.post("/api/executions/execute", content=content, headers=headers)
    assert answer.status_code in (400, 422)
    watching.cancel()
    await asyncio.wait([watching])
    assert slowest < 0.5
