"""A driver goes on when its connections break: what it has committed stands, and everything else is done again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.types import Event
from noetl_dagster.settings import Settings
from tests.playbooks import playbook, text_of

TEXT = """
workflow:
  - step: only
    tool: {kind: python, code: "result = open('FLAG').read()"}
"""
LOOP = """
  - step: s{number}
    loop: {{in: "{{{{ range(8) | list }}}}", iterator: n, mode: parallel, max_in_flight: 2}}
    tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "import time; time.sleep(0.01); result = n"}}
    next: [s{next}]
"""
LOOPS = 12
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
DECIDED = """
SELECT max(event_type) FROM noetl.event WHERE xact_id = pg_current_xact_id_if_assigned()
AND event_type IN ('execution.resumed', 'execution.cancelled', 'playbook.completed', 'state.claimed')
"""
CLAIMS = """
workflow:
  - step: load
    state: {key: n, initial: 0, concurrent: wait}
    tool: {kind: python, code: "result = [{'n': 1}]"}
"""
CALLS = """
workflow:
  - step: call
    tool: {kind: playbook, path: CHILD}
"""
CHILDREN = "SELECT count(*) FROM noetl.event WHERE event_type = 'playbook.initialized' AND parent_execution_id = $1"
IN_LOG = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = $2"


@pytest.fixture(params=["the commit is lost", "its answer is lost"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Breaks the connection the first time that a kind of decision commits; fills with their types."""
    seen: list[str] = []
    leave = Transaction.__aexit__

    async def left(self: Transaction, type_: Any, error: Any, trace: Any) -> None:
        connection = self._connection
        decided = await connection.fetchval(DECIDED) if error is None else None
        if decided is None or decided in seen:
            return await leave(self, type_, error, trace)
        seen.append(decided)
        if request.param == "its answer is lost":
            await leave(self, type_, error, trace)
        connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    monkeypatch.setattr(Transaction, "__aexit__", left)
    return seen


async def test_an_execution_is_resumed_and_completed_once(engine: Engine, tmp_path: Path, broken: list[str]) -> None:
    flag = tmp_path / "flag"
    failed = await engine.run(playbook(TEXT.replace("FLAG", str(flag))))
    assert failed.status == "FAILED"
    flag.write_text("there")

    state = await engine.resume(failed.execution_id)

    assert (state.status, state.epoch) == ("COMPLETED", 2)
    assert broken == ["execution.resumed", "playbook.completed"]
    for type_ in broken:
        assert await engine.runtime.pool.fetchval(IN_LOG, state.execution_id, type_) == 1


async def test_an_execution_is_cancelled_once(engine: Engine, broken: list[str]) -> None:
    execution = await engine.lifecycle.create(playbook(TEXT))
    assert await engine.lifecycle.cancel(execution.id), "this call has cancelled it"
    assert not await engine.lifecycle.cancel(execution.id)
    assert broken == ["execution.cancelled"]
    assert await engine.runtime.pool.fetchval(IN_LOG, execution.id, "execution.cancelled") == 1


async def test_a_watermark_is_claimed_once(engine: Engine, broken: list[str]) -> None:
    state = await engine.run(playbook(CLAIMS))
    assert (state.status, state.watermarks["load", 1]["value"]) == ("COMPLETED", 0), state.error
    assert broken == ["state.claimed", "playbook.completed"]
    for type_ in broken:
        assert await engine.runtime.pool.fetchval(IN_LOG, state.execution_id, type_) == 1


async def test_a_child_is_started_once(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the answer to its start is lost."""
    child = tmp_path / "child.yaml"
    child.write_text(text_of("child", TEXT.replace("open('FLAG').read()", "1")))
    execution = await engine.lifecycle.create(playbook(CALLS.replace("CHILD", str(child))))
    append = engine.runtime.log.append_with_first

    async def unanswered(events: Sequence[Event], **given: Any) -> bool:
        monkeypatch.undo()
        await append(events, **given)
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    monkeypatch.setattr(engine.runtime.log, "append_with_first", unanswered)
    state = await engine.resume(execution.id)

    assert state.status == "COMPLETED", state.error
    assert await engine.runtime.pool.fetchval(CHILDREN, execution.id) == 1


async def test_a_driver_outlives_its_connections(engine: Engine, settings: Settings) -> None:
    """All of them end again and again, at any moment, as in an outage or a failover; ever more rarely."""
    loops = "".join(LOOP.format(number=number, next=number + 1) for number in range(LOOPS))
    last = f"  - step: s{LOOPS}\n    tool: {{kind: python, code: 'result = 1'}}"
    execution = await engine.lifecycle.create(playbook(f"workflow:{loops}{last}"))
    other = await asyncpg.connect(settings.db_url)
    running = asyncio.create_task(engine.resume(execution.id))
    cut, pause = 0, 0.05
    while not running.done():
        cut += len(await other.fetch(CUT))
        await asyncio.wait([running], timeout=pause)
        pause *= 1.2
    await other.close()

    state = await running
    assert state.status == "COMPLETED", state.error
    assert cut > LOOPS
    ends = await engine.runtime.pool.fetchval(IN_LOG, execution.id, "command.completed")
    assert ends == 8 * LOOPS + 1
