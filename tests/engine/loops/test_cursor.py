"""Cursor loops that give rows back: nothing is lost and nothing written twice, whoever dies when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.loops import frames as loop_frames
from noetl_dagster.engine.loops.frames import Frames, release_expired
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.tools.sql.running import run_statements
from tests.playbooks import playbook
from tests.waiting import until

CHORES = """
    workload: {gate: open, lease: 300, heartbeat: 100.0, partial: false}
    workflow:
      - step: work
        loop:
          cursor:
            kind: postgres
            auth: pg_local
            claim: |
              UPDATE chores SET state = 'claimed', claims = claims + 1 WHERE id IN (
                SELECT id FROM chores WHERE state = 'new' ORDER BY id LIMIT :__frame_max_rows FOR UPDATE SKIP LOCKED
              ) RETURNING id, label
            release: UPDATE chores SET state = 'new', releases = releases + 1 WHERE id = :id AND label = '{{ chore.label }}'
          iterator: chore
          spec:
            mode: cursor
            max_in_flight: 1
            allow_partial: "{{ workload.partial }}"
            frame:
              max_rows: 3
              lease_seconds: "{{ workload.lease }}"
              heartbeat_seconds: "{{ workload.heartbeat }}"
              process: PROCESS
        tool:
          - name: wait
            kind: postgres
            auth: pg_local
            command: "SELECT count(*) AS open FROM gate"
            spec:
              policy:
                rules:
                  - {when: "{{ output.data.rows[0].open == 0 }}", then: {do: retry, attempts: 100000, delay: 0.05}}
          - name: give
            kind: python
            input: {chore: "{{ chore }}"}
            code: "result = chore if isinstance(chore, list) else [chore]"
            sink: {tool: postgres, auth: pg_local, table: done}
"""
TABLES = """
CREATE TABLE chores AS SELECT id, 'new' AS state, 'a-' || id AS label, 0 AS claims, 0 AS releases
FROM generate_series(1, 7) AS id;
CREATE TABLE gate (n int);
CREATE TABLE done (id int, label text);
"""


class Died(BaseException):
    """The end of a process, after which it does nothing more."""


@pytest.fixture(autouse=True)
async def tables(engine: Engine) -> None:
    await engine.runtime.pool.execute(TABLES)


def chores(process: str = "row") -> Any:
    return playbook(CHORES.replace("PROCESS", process).replace("\n    ", "\n"))


async def states(engine: Engine) -> list[tuple[str, int, int]]:
    rows = await engine.runtime.pool.fetch("SELECT state, claims, releases FROM chores ORDER BY id")
    return [tuple(row) for row in rows]


async def frames(engine: Engine) -> int:
    return int(await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.cursor_frame"))


async def open_gate(engine: Engine) -> None:
    await engine.runtime.pool.execute("INSERT INTO gate VALUES (1)")


async def check_done_once(engine: Engine) -> None:
    rows = await engine.runtime.pool.fetch("SELECT id FROM done ORDER BY id")
    assert [row["id"] for row in rows] == list(range(1, 8))
    assert await frames(engine) == 0


async def begin(engine: Engine, process: str = "row", **workload: Any) -> tuple[int, asyncio.Task[Any]]:
    """Drives an execution until it has claimed its first rows, and waits with the first of them."""
    execution = await engine.lifecycle.create(chores(process), workload)
    work = asyncio.create_task(engine.guard(execution, engine.walker.run(execution)))
    query = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed'"
    await until(lambda: engine.runtime.pool.fetchval(query, execution.id), "the first row to be worked on")
    return execution.id, work


async def die(work: asyncio.Task[Any]) -> None:
    """A driver that dies does nothing more."""
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


@pytest.mark.parametrize("process", ["row", "frame"])
async def test_rows_of_a_driver_that_died_are_claimed_again(engine: Engine, process: str) -> None:
    execution_id, work = await begin(engine, process)
    await die(work)
    assert await frames(engine) == 1
    await open_gate(engine)
    state = await engine.resume(execution_id)
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)
    assert await states(engine) == [("claimed", 2, 1)] * 3 + [("claimed", 1, 0)] * 4
    envelope = state.latest["work"].envelope
    total = 7 if process == "row" else 3
    assert [envelope[key] for key in ("total", "done", "failed")] == [total, total, 0]


@pytest.mark.parametrize("process", ["row", "frame"])
async def test_a_cancellation_gives_rows_back(engine: Engine, process: str) -> None:
    execution_id, work = await begin(engine, process)
    assert await engine.lifecycle.cancel(execution_id)
    with pytest.raises(ExecutionCancelledError):
        await work
    assert await states(engine) == [("new", 1, 1)] * 3 + [("new", 0, 0)] * 4
    assert await frames(engine) == 0


async def test_a_lease_that_runs_out_gives_rows_back_and_its_driver_comes_too_late(engine: Engine) -> None:
    """The driver sleeps so long that its rows are given to another execution; both wake at once."""
    _, work = await begin(engine)
    pool = engine.runtime.pool
    await pool.execute("UPDATE noetl.cursor_frame SET lease_until = now() - interval '1 second'")
    assert (await engine.reaper().reap()).released == 1
    assert (await states(engine))[:3] == [("new", 1, 1)] * 3
    await open_gate(engine)
    other = await engine.run(chores())
    await work
    assert str(other.status) == "COMPLETED", other.error
    await check_done_once(engine)


async def test_a_claim_that_cannot_be_given_back_does_not_hold_up_others(engine: Engine) -> None:
    execution_id, work = await begin(engine)
    await die(work)
    pool = engine.runtime.pool
    await pool.execute(
        """
        INSERT INTO noetl.cursor_frame
            (execution_id, loop_id, first_index, step, visit, rows, by_row, lease_until, claim_xid)
        VALUES (1, '1', 0, 'work', 1, '[]', true, now(), 1), ($1, '1', 0, 'gone', 1, '[]', true, now(), 1),
            ($1, '1', 1, 'work', 1, '5', true, now(), 1)""",
        execution_id,
    )
    await pool.execute("UPDATE noetl.cursor_frame SET lease_until = now()")
    assert (await engine.reaper().reap()).released == 1
    assert (await states(engine))[:3] == [("new", 1, 1)] * 3
    assert await frames(engine) == 3, "of an execution and a step that nobody knows, and one whose rows are no list"


async def test_leases_of_a_driver_that_lives_are_kept(engine: Engine) -> None:
    _, work = await begin(engine, lease=60, heartbeat=0.1)
    pool = engine.runtime.pool
    query = "SELECT lease_until FROM noetl.cursor_frame"
    first = await pool.fetchval(query)
    await until(lambda: pool.fetchval(f"SELECT lease_until > $1 FROM ({query}) f", first), "a heartbeat")
    await die(work)


async def test_a_claim_outlives_a_change_of_its_table(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session changes the table between the claim's preparation and its run."""
    changed = False

    async def change_and_run(*args: Any) -> Any:
        nonlocal changed
        if not changed:
            changed = True
            raise asyncpg.InvalidCachedStatementError("cached plan must not change result type")
        return await run_statements(*args)

    monkeypatch.setattr("noetl_dagster.engine.loops.cursor.run_statements", change_and_run)
    await open_gate(engine)
    state = await engine.run(chores())
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)


async def test_a_claim_that_did_not_commit_gives_nothing_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver dies between writing down what it claims and the commit of the claim."""
    keep = Frames.keep

    async def keep_and_die(*args: Any, **kwargs: Any) -> None:
        await keep(*args, **kwargs)
        raise Died

    execution = await engine.lifecycle.create(chores())
    with monkeypatch.context() as dying:
        dying.setattr(Frames, "keep", keep_and_die)
        with pytest.raises(Died):
            await engine.guard(execution, engine.walker.run(execution))
    assert await frames(engine) == 1
    await open_gate(engine)
    state = await engine.resume(execution.id)
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)
    assert await states(engine) == [("claimed", 1, 0)] * 7


@pytest.mark.parametrize("process", ["row", "frame"])
@pytest.mark.parametrize("partial", [False, True], ids=["the loop fails", "the loop may fail in part"])
async def test_failed_rows_are_given_back_if_the_loop_fails(engine: Engine, process: str, partial: bool) -> None:
    pool = engine.runtime.pool
    await open_gate(engine)
    await pool.execute("ALTER TABLE done ADD CONSTRAINT trouble CHECK (id <> 2)")
    state = await engine.run(chores(process), {"partial": partial})
    failed = [2] if process == "row" else [1, 2, 3]
    if partial:
        assert str(state.status) == "COMPLETED", state.error
        assert await states(engine) == [("claimed", 1, 0)] * 7
        assert await frames(engine) == 0
        return
    assert str(state.status) == "FAILED"
    expected = [("new", 1, 1) if row in failed else ("claimed", 1, 0) for row in range(1, 8)]
    assert await states(engine) == expected
    await pool.execute("ALTER TABLE done DROP CONSTRAINT trouble")
    state = await engine.resume(state.execution_id)
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)
    total = 7 if process == "row" else 3
    assert [state.latest["work"].envelope[key] for key in ("total", "done", "failed")] == [total, total, 0]


async def _claimed_by_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch, column: str) -> tuple[int, Any, Any]:
    """A driver dies, and a transaction of its frame stays open; returns the session and the transaction too."""
    monkeypatch.setattr(loop_frames, "PAUSE_SECONDS", 0.02)
    execution_id, work = await begin(engine)
    await die(work)
    assert engine.runtime.settings.db_url is not None
    session = await asyncpg.connect(engine.runtime.settings.db_url)
    transaction = session.transaction()
    await transaction.start()
    xid = await session.fetchval("SELECT txid_current()")
    await engine.runtime.pool.execute(f"UPDATE noetl.cursor_frame SET {column} = $1", xid)
    await open_gate(engine)
    return execution_id, session, transaction


async def test_the_session_of_a_claim_that_is_gone_is_terminated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was never committed, so its rows are claimed by the loop that goes on."""
    pool = engine.runtime.pool
    execution_id, session, _ = await _claimed_by_nobody(engine, monkeypatch, "claim_xid")
    await pool.execute("UPDATE chores SET state = 'new', claims = 0")
    await session.execute("UPDATE chores SET state = 'claimed' WHERE id <= 3")
    state = await engine.resume(execution_id)
    assert session.is_closed()
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)
    assert await states(engine) == [("claimed", 1, 0)] * 7


async def test_a_loop_does_not_go_on_while_another_process_releases_its_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution_id, session, transaction = await _claimed_by_nobody(engine, monkeypatch, "release_xid")
    state = await engine.resume(execution_id)
    assert str(state.status) == "FAILED"
    assert "a transaction that claims or releases them is still open" in str(state.error)
    await transaction.rollback()
    await session.close()
    state = await engine.resume(execution_id)
    assert str(state.status) == "COMPLETED", state.error
    await check_done_once(engine)
    assert await states(engine) == [("claimed", 2, 1)] * 3 + [("claimed", 1, 0)] * 4


async def test_rows_are_given_back_once_whoever_dies_after_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release commits in the playbook's database and its process dies before it says so."""
    _, work = await begin(engine)
    await die(work)
    pool = engine.runtime.pool
    await pool.execute("UPDATE noetl.cursor_frame SET lease_until = now()")
    with monkeypatch.context() as dying:
        dying.setattr("noetl_dagster.engine.loops.frames.FORGET", "SELECT 1 / 0, $1::bigint, $2::text, $3::int")
        with pytest.raises(Exception, match="division by zero"):
            await release_expired(engine.runtime)
    assert (await states(engine))[:3] == [("new", 1, 1)] * 3
    assert await frames(engine) == 1
    assert (await engine.reaper().reap()).released == 1
    assert (await states(engine))[:3] == [("new", 1, 1)] * 3, "not once more"
    assert await frames(engine) == 0
