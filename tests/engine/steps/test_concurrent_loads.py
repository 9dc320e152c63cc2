"""Executions that load up to one watermark at the same time: each row is loaded once, unless the step allows more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.steps.watermarks import watermarks
from noetl_dagster.events.queries import WATERMARK_LOCK
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.settings import Settings
from tests import forked
from tests.engine.conftest import Run
from tests.playbooks import playbook
from tests.waiting import HERE, until

PATH = "tests/sample"
LOCK = 11
"""Of the log's database: the test holds it, and with it every execution that is to write its rows."""

SELECT = """
      state: {key: n, initial: 0, concurrent: MODE, name: NAME}
      tool: {kind: postgres, auth: pg, input: {since: "{{ state.value }}"},
             command: "SELECT n FROM source WHERE n > :since ORDER BY n"}"""
WRITE = "SELECT pg_advisory_xact_lock_shared(11); INSERT INTO target SELECT * FROM jsonb_to_recordset((:rows)::jsonb) AS r (n int)"
SINK = f"""
workflow:
    - step: load{SELECT}
      sink: {{tool: postgres, auth: pg, command: "{WRITE}", args: {{rows: "{{{{ result.rows | tojson }}}}"}}}}
"""
LATER = f"""
workflow:
    - step: load{SELECT}
      next: [write]
    - step: write
      tool: {{kind: postgres, auth: pg, input: {{rows: "{{{{ load.rows | tojson }}}}"}}, command: "{WRITE}"}}
"""
STEPS = {"sink": SINK, "later step": LATER}


def text_of(shape: str, mode: str, name: str = "load") -> str:
    return STEPS[shape].replace("MODE", mode).replace("NAME", name)


@pytest.fixture(autouse=True)
async def tables(pool: asyncpg.Pool[Any]) -> None:
    await pool.execute("CREATE TABLE source (n int); CREATE TABLE target (n int); INSERT INTO source VALUES (1), (2)")


@asynccontextmanager
async def held(pool: asyncpg.Pool[Any]) -> AsyncIterator[None]:
    """Lets no execution write rows until the block ends."""
    async with pool.acquire() as holder:
        await holder.execute(f"SELECT pg_advisory_lock({LOCK})")
        try:
            yield
        finally:
            await holder.execute(f"SELECT pg_advisory_unlock({LOCK})")


HELD = f"FROM pg_locks WHERE NOT granted AND objid = {LOCK} AND objsubid = 1 AND {HERE}"


async def writing(pool: asyncpg.Pool[Any], count: int = 1) -> None:
    """Waits until so many executions are held."""
    query = f"SELECT count(*) {HELD}"

    async def there() -> bool:
        return bool(await pool.fetchval(query) == count)

    await until(there, f"{count} executions to write")


async def waiting(pool: asyncpg.Pool[Any], count: int = 1) -> list[str]:
    """Waits until so many executions wait for another one; gives what they say."""
    query = "SELECT error FROM noetl.event WHERE event_type = 'warning' AND meta ? 'waits_for' ORDER BY event_id"

    async def there() -> list[Any] | None:
        rows = await pool.fetch(query)
        return rows if len(rows) == count else None

    return [row["error"] for row in await until(there, f"{count} executions to wait")]


async def warnings(pool: asyncpg.Pool[Any]) -> list[str]:
    query = "SELECT error FROM noetl.event WHERE event_type = 'warning' AND NOT meta ? 'waits_for' ORDER BY event_id"
    return [row["error"] for row in await pool.fetch(query)]


async def loaded(pool: asyncpg.Pool[Any]) -> list[int]:
    return [row["n"] for row in await pool.fetch("SELECT n FROM target ORDER BY n")]


async def stands(pool: asyncpg.Pool[Any]) -> dict[str, Any]:
    return {one.name: one.value for one in await watermarks(pool, PATH)}


@pytest.mark.parametrize("shape", STEPS)
async def test_the_second_waits_and_loads_what_is_new(engine: Engine, pool: asyncpg.Pool[Any], shape: str) -> None:
    text = text_of(shape, "wait")
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool)
        await pool.execute("INSERT INTO source VALUES (3)")
        second = asyncio.create_task(engine.run(playbook(text)))
        [told] = await waiting(pool)
    one, two = await first, await second
    assert (one.error, two.error) == (None, None)
    assert await loaded(pool) == [1, 2, 3]
    assert two.watermarks[("load", 1)]["value"] == 2
    assert told == (
        f"step load: execution {one.execution_id} loads up to the same watermark, 'load'; this one waits for it"
    )
    assert await warnings(pool) == []
    assert await stands(pool) == {"load": 3}


async def test_the_second_fails_and_names_the_first(engine: Engine, run: Run, pool: asyncpg.Pool[Any]) -> None:
    text = text_of("sink", "fail")
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool)
        second = await run(text)
    one = await first
    assert second.error is not None
    assert f"execution {one.execution_id} loads up to the same watermark, 'load'; start this one again" in second.error
    await pool.execute("INSERT INTO source VALUES (3)")
    resumed = await engine.resume(second.execution_id)
    assert resumed.error is None
    assert await loaded(pool) == [1, 2, 3]


async def test_of_two_that_claim_at_once_one_waits(engine: Engine, pool: asyncpg.Pool[Any]) -> None:
    async def both_claim() -> bool:
        query = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND {HERE}"
        return bool(await pool.fetchval(query) == 2)

    async with held(pool):
        async with pool.acquire() as claimant, claimant.transaction():
            await claimant.execute(WATERMARK_LOCK, PATH, "load", "")
            both = [asyncio.create_task(engine.run(playbook(text_of("sink", "wait")))) for _ in range(2)]
            await until(both_claim, "two claims")
        await waiting(pool)
    assert [(await one).error for one in both] == [None, None]
    assert await loaded(pool) == [1, 2]


async def test_a_claim_ends_with_its_visit(engine: Engine, run: Run, pool: asyncpg.Pool[Any]) -> None:
    """Its execution still runs another step."""
    text = text_of("sink", "fail").replace(f"pg_advisory_xact_lock_shared({LOCK})", "1")
    hold = f"    - step: hold\n      tool: {{kind: postgres, auth: pg, command: SELECT pg_advisory_xact_lock_shared({LOCK})}}\n"
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(f"{text}      next: [hold]\n{hold}")))
        await writing(pool)
        second = await run(text)
    assert (second.error, (await first).error) == (None, None)


async def test_an_execution_that_is_driven_keeps_its_claim(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long nothing of it came into the log."""
    monkeypatch.setattr("noetl_dagster.engine.steps.watermarks.RECOVERY_SECONDS", -1e9)
    text = text_of("sink", "fail")
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool)
        second = await run(text.replace(f"pg_advisory_xact_lock_shared({LOCK})", "1"))
    assert "loads up to the same watermark" in str(second.error)
    assert (await first).error is None
    assert await loaded(pool) == [1, 2]


@pytest.mark.parametrize("shape", STEPS)
async def test_both_load_if_allowed_and_the_lost_race_is_told(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any], shape: str
) -> None:
    text = text_of(shape, "allow")
    async with held(pool):
        slower = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool)
        await pool.execute("INSERT INTO source VALUES (3)")
        faster = asyncio.create_task(engine.run(playbook(text.replace("pg_advisory_xact_lock_shared(11)", "1"))))
        faster_state = await faster
    ended = await slower
    assert await loaded(pool) == [1, 1, 2, 2, 3]
    assert await stands(pool) == {"load": 3}
    [warning] = await warnings(pool)
    assert f"execution {faster_state.execution_id} has moved the watermark 'load' to 3 since this one began" in warning
    assert "it stands at 3" in warning
    assert ended.error is None


async def test_other_names_do_not_wait(engine: Engine, run: Run, pool: asyncpg.Pool[Any]) -> None:
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(text_of("sink", "wait", "a"))))
        await writing(pool)
        second = asyncio.create_task(engine.run(playbook(text_of("sink", "wait", "b"))))
        await writing(pool, 2)
    assert ((await first).error, (await second).error) == (None, None)
    assert await stands(pool) == {"a": 2, "b": 2}


async def test_a_child_does_not_wait_for_the_execution_that_started_it(
    run: Run, pool: asyncpg.Pool[Any], tmp_path: Any
) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(
        f"apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {{name: child, path: {PATH}}}\n"
        "workflow:\n  - step: load\n    state: {key: n, initial: 0}\n"
        "    tool: {kind: python, code: \"result = [{'n': 4}]\"}\n"
    )
    state = await run(f"""
workflow:
  - step: load
    state: {{key: n, initial: 0}}
    tool: {{kind: playbook, path: {child}}}
""")
    assert state.error is None
    assert await pool.fetchval("SELECT count(*) FROM noetl.event WHERE meta ? 'waits_for'") == 0


CROSSED = f"""
workflow:
    - step: FIRST{SELECT.replace("NAME", "FIRST").replace("MODE", "wait")}
      next: [hold]
    - step: hold
      tool: {{kind: postgres, auth: pg, command: "SELECT pg_advisory_xact_lock_shared({LOCK})"}}
      next: [SECOND]
    - step: SECOND{SELECT.replace("NAME", "SECOND").replace("MODE", "wait")}
"""


async def test_of_two_that_wait_for_each_other_the_later_one_fails(engine: Engine, pool: asyncpg.Pool[Any]) -> None:
    forth, back = (CROSSED.replace("FIRST", one).replace("SECOND", two) for one, two in (("a", "b"), ("b", "a")))
    async with held(pool):
        both = [asyncio.create_task(engine.run(playbook(text))) for text in (forth, back)]
        await writing(pool, 2)
    older, later = sorted([await one for one in both], key=lambda state: state.execution_id)
    assert older.error is None
    assert f"execution {older.execution_id} loads up to the same watermark" in str(later.error)
    assert "waits for a watermark that this one has" in str(later.error)
    assert (await engine.resume(later.execution_id)).error is None


def drive(settings: Settings, text: str) -> None:
    """Runs a playbook in a process of its own."""

    async def run() -> None:
        engine = await Engine.open(settings)
        await engine.run(playbook(text))

    asyncio.run(run())


@asynccontextmanager
async def killed_while_it_writes(settings: Settings, pool: asyncpg.Pool[Any], text: str) -> AsyncIterator[int]:
    """Kills the process of an execution before its rows are written; gives its id."""
    async with held(pool):
        process = forked.process(os.environ, drive, settings, text)
        process.start()
        await writing(pool)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        # a session that waits for a lock does not see that its client is gone
        await pool.execute(f"SELECT pg_terminate_backend(pid) {HELD}")
        await writing(pool, 0)
    query = "SELECT execution_id FROM noetl.event WHERE event_type = 'playbook.initialized'"
    yield await pool.fetchval(query)


@pytest.mark.long
@pytest.mark.parametrize("shape", STEPS)
async def test_a_killed_one_keeps_its_place_until_it_is_resumed(
    settings: Settings, engine: Engine, pool: asyncpg.Pool[Any], shape: str
) -> None:
    text = text_of(shape, "wait")
    engine.runtime.settings = settings.model_copy(update={"recovery_backoff_seconds": 1e6})
    async with killed_while_it_writes(settings, pool, text) as killed:
        await pool.execute("INSERT INTO source VALUES (3)")
        second = asyncio.create_task(engine.run(playbook(text)))
        await waiting(pool)
        resumed = await engine.resume(killed)
        assert resumed.error is None
        assert (await second).error is None
    assert await loaded(pool) == [1, 2, 3]
    assert await stands(pool) == {"load": 3}
    assert await warnings(pool) == []


@pytest.mark.long
async def test_a_killed_one_that_is_not_resumed_loses_its_place(
    settings: Settings, engine: Engine, run: Run, pool: asyncpg.Pool[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.engine.steps.watermarks.RECOVERY_SECONDS", 0.0)
    engine.runtime.settings = settings.model_copy(update={"recovery_backoff_seconds": 1e-6})
    text = text_of("sink", "wait")
    async with killed_while_it_writes(settings, pool, text) as killed:
        second = await run(text)
        assert second.error is None
        await pool.execute("INSERT INTO source VALUES (3)")
        resumed: ExecutionState = await engine.resume(killed)
    assert resumed.error is None
    assert resumed.watermarks[("load", 1)]["value"] == 2
    assert await loaded(pool) == [1, 2, 3]


async def test_what_was_out_of_reach_writes_nothing_when_another_one_has_its_place(
    engine: Engine, run: Run, pool: asyncpg.Pool[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one lives, but its sessions were lost for so long that the second one took it for lost."""
    text = text_of("sink", "wait")
    async with held(pool):
        first = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool)

        async def holds(*_: Any) -> bool:
            return False

        monkeypatch.setattr("noetl_dagster.engine.steps.watermarks.WatermarkClaims._holds", holds)
        second = asyncio.create_task(engine.run(playbook(text)))
        await writing(pool, 2)
    one, two = await first, await second
    assert f"execution {two.execution_id} has claimed the watermark 'load'" in str(one.error)
    assert two.error is None
    assert await loaded(pool) == [1, 2]
