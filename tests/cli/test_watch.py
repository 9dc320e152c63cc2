"""Commands that show an execution until it ends: ``status --watch`` and ``events --follow``."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from noetl_dagster.cli import progress
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution
from tests.forked import Forked
from tests.playbooks import text_of
from tests.waiting import PROCESS_SECONDS, until, until_now

from .conftest import Cli

GATED = text_of(
    "gated",
    """
    workload: {gate: "", n: 1}
    workflow:
      - step: start
        tool:
          kind: python
          input: {gate: "{{ gate }}"}
          code: |
            import pathlib, time
            while not pathlib.Path(gate).exists():
                time.sleep(0.05)
            result = 1
        next: [squares]
      - step: squares
        loop: {in: "{{ range(30) | list }}", iterator: item}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / n"}
    """,
)

COMMITTED = "SELECT event_id::text FROM noetl.event WHERE execution_id = $1 ORDER BY xact_id, event_id"

Start = Callable[..., Forked]


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    opened = await Engine.open(settings)
    yield opened
    await opened.close()


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts ``noetl-dagster``, which writes to ``shown`` and ``notes`` of the test's folder."""
    started: list[Forked] = []

    def make(*arguments: str) -> Forked:
        one = Forked(
            "noetl-dagster",
            *arguments,
            environment=environment,
            folder=tmp_path,
            output=tmp_path / "shown",
            errors=tmp_path / "notes",
        )
        started.append(one)
        return one

    yield make
    for one in started:
        one.kill()


async def gated(engine: Engine, folder: Path, n: int = 1) -> Execution:
    return await engine.lifecycle.create(parse_playbook(GATED), {"gate": str(folder / "gate"), "n": n})


async def sessions(engine: Engine) -> int:
    return int(
        await engine.runtime.pool.fetchval("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    )


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def exit_code(process: Forked) -> int:
    return await asyncio.to_thread(process.wait, PROCESS_SECONDS)


@pytest.mark.parametrize(("n", "code", "state"), [(1, 0, "COMPLETED"), (0, 1, "FAILED")])
async def test_status_is_watched_until_the_end(
    engine: Engine, start: Start, tmp_path: Path, n: int, code: int, state: str
) -> None:
    execution = await gated(engine, tmp_path, n)
    driving = asyncio.create_task(engine.drive(execution))
    watching = start("status", "--watch", str(execution.id))
    await until(lambda: "start: running" in written(tmp_path / "notes"), "the first line")
    assert watching.poll() is None
    assert written(tmp_path / "shown") == ""
    (tmp_path / "gate").touch()
    assert await exit_code(watching) == code
    await driving
    notes, shown = written(tmp_path / "notes"), written(tmp_path / "shown")
    assert f"squares: {state.lower()}" in notes
    assert f"/executions/{execution.id}" in notes
    assert "no process runs it" not in notes
    assert f"{execution.id}  gated  {state}" in shown


async def test_an_ended_execution_is_watched_no_longer(engine: Engine, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    execution = await gated(engine, tmp_path)
    await engine.drive(execution)
    done = await asyncio.to_thread(cli, "status", "--watch", "--json", str(execution.id))
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["status"] == "COMPLETED"


@pytest.mark.parametrize("command", [["status", "--watch"], ["events", "--follow"]])
async def test_an_interrupt_ends_it_quietly(engine: Engine, start: Start, tmp_path: Path, command: list[str]) -> None:
    execution = await gated(engine, tmp_path)
    await engine.liveness.hold(execution.id)
    before = await sessions(engine)
    showing = start(*command, str(execution.id))

    async def reads() -> bool:
        return await sessions(engine) > before

    await until(reads, "its connection to the event log")
    if "events" in command:
        await until(lambda: "playbook.initialized" in written(tmp_path / "shown"), "the first event")
    assert showing.poll() is None, written(tmp_path / "notes")
    showing.send_signal(signal.SIGINT)
    assert await exit_code(showing) == 130
    assert "Traceback" not in written(tmp_path / "notes")


async def test_events_are_followed_in_the_order_of_their_commits(engine: Engine, start: Start, tmp_path: Path) -> None:
    execution = await gated(engine, tmp_path)
    driving = asyncio.create_task(engine.drive(execution))
    following = start("events", "--follow", "--json", str(execution.id))
    await until(lambda: "command.issued" in written(tmp_path / "shown"), "the first command")
    assert following.poll() is None
    (tmp_path / "gate").touch()
    assert await exit_code(following) == 0, written(tmp_path / "notes")
    await driving
    found = [json.loads(line)["event_id"] for line in written(tmp_path / "shown").splitlines()]
    assert found == [row[0] for row in await engine.runtime.pool.fetch(COMMITTED, execution.id)]
    assert len(found) > 90


async def test_events_are_followed_from_an_event_on(engine: Engine, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    execution = await gated(engine, tmp_path)
    await engine.drive(execution)
    ids = [row[0] for row in await engine.runtime.pool.fetch(COMMITTED, execution.id)]
    rest = await asyncio.to_thread(cli, "events", "-f", "--after", ids[9], str(execution.id))
    assert [line.split()[1] for line in rest.stdout.splitlines()] == ids[10:]
    for arguments, error in [
        (["--after", "1", str(execution.id)], f"execution {execution.id} has no event 1"),
        (["12345"], "no execution 12345"),
    ]:
        done = await asyncio.to_thread(cli, "events", "-f", *arguments)
        assert (done.returncode, error in done.stderr) == (1, True)


def test_an_execution_that_nobody_drives_is_said_to_be_so(
    noetl: EngineProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.02)
    said: list[str] = []
    monkeypatch.setattr(progress, "note", said.append)
    execution = noetl.run(gated(noetl.engine(), tmp_path))
    with ThreadPoolExecutor(1) as watching:
        ended = watching.submit(progress.watch, noetl.engine(), execution.id, quiet=True)
        until_now(lambda: said, "the hint")
        assert noetl.run(noetl.engine().lifecycle.cancel(execution.id))
        ended.result(PROCESS_SECONDS)
    assert said == [f"no process runs it now; to resume it: noetl-dagster resume {execution.id}"]


async def test_status_tells_what_recovery_has_done(engine: Engine, cli: Cli, tmp_path: Path) -> None:
    execution = await gated(engine, tmp_path)
    notes = (await asyncio.to_thread(cli, "status", str(execution.id))).stderr
    assert f"no process runs it now; to resume it: noetl-dagster resume {execution.id}" in notes
    assert "recovery" not in notes
    resumed = Event(execution.id, engine.runtime.ids.next(), EventType.EXECUTION_RESUMED)
    resumed.meta = {"epoch": 2, "recovery": True}
    await engine.runtime.log.append([resumed])
    notes = (await asyncio.to_thread(cli, "status", str(execution.id))).stderr
    assert "recovery has resumed it (1 of 5 times); it resumes it again in" in notes
