"""``/health`` and ``/ready`` of processes without an HTTP server: stuck is one thing, services that are away another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from noetl_dagster import embedded
from noetl_dagster.cli import health as module
from noetl_dagster.cli.health import Health, healthy
from noetl_dagster.errors import VersionError
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.settings import Settings
from tests.forked import run
from tests.processes import StartProcess, killed_in_the_end
from tests.proxy import cutting
from tests.waiting import PROCESS_SECONDS, until, until_now


@pytest.fixture
async def watched(settings: Settings, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[tuple[Health, str]]:
    """A process's health and its address."""
    async with healthy(settings.model_copy(update={"health_port": 0})) as health:
        yield health, capsys.readouterr().out.split()[-1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)


async def ask(url: str) -> tuple[int, str]:
    answer = await asyncio.to_thread(httpx.get, url, timeout=60, trust_env=False)
    return answer.status_code, answer.text


async def test_a_process_that_begins(watched: tuple[Health, str]) -> None:
    health, url = watched
    assert await ask(f"{url}/ready") == (503, "starting\n")
    assert await ask(f"{url}/health") == (200, "ok\n")
    health.begins()
    await until(lambda: health.unready() is None)
    assert (await ask(f"{url}/ready"))[0] == 200
    text = (await ask(f"{url}/metrics"))[1]
    assert "noetl_process_ready 1.0" in text
    assert "noetl_process_live 1.0" in text
    assert (await ask(f"{url}/elsewhere"))[0] == 404
    health._draining = True
    assert await ask(f"{url}/ready") == (503, "draining\n")
    assert (await ask(f"{url}/health"))[0] == 200


async def test_a_schema_that_refuses_this_version_is_not_waited_for(watched: tuple[Health, str]) -> None:
    async def refused() -> None:
        raise VersionError("update this process")

    with pytest.raises(VersionError):
        await asyncio.wait_for(watched[0].open(refused), PROCESS_SECONDS)


async def test_a_loop_that_stands_still(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.5)
    async with healthy(settings.model_copy(update={"health_port": 0})) as health:
        url = capsys.readouterr().out.split()[-1]
        script = (
            "import sys, time, httpx\n"
            "while httpx.get(sys.argv[1], timeout=60, trust_env=False).status_code == 200: time.sleep(0.05)"
        )
        command = [sys.executable, "-c", script, f"{url}/health"]
        asking = subprocess.Popen(command)  # noqa: ASYNC220
        asking.wait(PROCESS_SECONDS)  # blocks the event loop, as a defect would
        assert asking.returncode == 0
        await until(lambda: health.stuck() is None, "the loop to go on")


async def test_work_that_stands_still(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.2)
    health = Health(settings)
    health.begins()
    await health.look()
    stands = time.monotonic()
    health.active_at = lambda: stands
    await asyncio.sleep(0)
    await until(lambda: "work has not progressed" in str(health.stuck()) or time.monotonic() < stands + 0.1)
    health._looked = time.monotonic()
    await until(lambda: health.stuck() is not None)
    health.active_at = None
    health.trouble = lambda: "a task has ended"
    health._looked = time.monotonic()
    assert health.stuck() == "a task has ended"


async def test_services_that_are_away_kill_nobody(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.3)
    assert settings.db_url is not None
    there = urlsplit(settings.db_url)
    cut = False

    async with cutting(f"http://{there.hostname}:{there.port}", lambda _: cut) as url:
        place = urlsplit(url).netloc
        own = settings.model_copy(update={"db_url": settings.db_url.replace(f"{there.hostname}:{there.port}", place)})
        health = Health(own)
        health.client = client = await connect(settings, "health")
        health.active_at = lambda: 0.0  # the work waits for PostgreSQL
        health.begins()
        watching = asyncio.create_task(health.watch())
        await until(lambda: health.unready() is None)
    # the proxy takes no more connections; the one that is open goes too
    assert health._connection is not None
    health._connection.terminate()
    await until(lambda: "PostgreSQL does not answer" in str(health.unready()))
    waited = time.monotonic()
    await until(lambda: time.monotonic() > waited + 1.0)  # longer than STUCK_SECONDS
    assert health.stuck() is None
    health._settings = settings
    await until(lambda: health.unready() is None)
    await client.close()
    await until(lambda: health.unready() == "NATS does not answer: not connected")
    watching.cancel()


@pytest.fixture
def start() -> Iterator[StartProcess]:
    with killed_in_the_end() as starts:
        yield starts


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=60, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_processes_wait_for_the_schema_and_drain(settings: Settings, start: StartProcess, tmp_path: Path) -> None:
    async def forget() -> None:
        connection = await asyncpg.connect(settings.db_url)
        await connection.execute("DROP SCHEMA noetl CASCADE")
        await connection.close()

    asyncio.run(forget())
    environment = {
        **os.environ,
        **embedded.environment(settings),
        "NOETL_EMBEDDED": "false",
        "NOETL_SCHEMA_APPLY": "false",
        "NOETL_HEALTH_PORT": "0",
    }
    logs, processes = [tmp_path / command for command in ("worker", "ingest")], []
    for log in logs:
        with log.open("w") as output:
            arguments = [sys.executable, "-u", "-m", "noetl_dagster", log.name]
            processes.append(start(arguments, env=environment, stdout=output))
    until_now(lambda: all("health on" in log.read_text() for log in logs), "the ports")
    urls = [next(word for word in log.read_text().split() if word.startswith("http://")) for log in logs]
    until_now(lambda: all("no schema yet" in log.read_text() for log in logs), "the processes to look")
    assert not any(map(ready, urls))
    assert [process.poll() for process in processes] == [None, None]
    provisioned = run("noetl-dagster", "provision", environment=environment, folder=tmp_path, texts=tmp_path)
    assert provisioned.returncode == 0, provisioned.stderr
    until_now(lambda: all(map(ready, urls)), "the processes to be ready")
    for process, log in zip(processes, logs, strict=True):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PROCESS_SECONDS) == 0, log.read_text()


def test_a_port_set_to_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, port in (("", None), ("0", 0), ("8701", 8701)):
        monkeypatch.setenv("NOETL_HEALTH_PORT", text)
        assert Settings().health_port == port
