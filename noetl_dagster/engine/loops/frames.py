"""Frames of cursor loops: the rows that a loop claimed at once, as the log's database records them.

A frame is written before its claim commits, and deleted when all its rows have succeeded, so that the rows of a driver
that died are known. Its lease specifies how long the driver may be silent before its rows are released: after a
cancellation, an expired lease, a failure of the loop or the death of the driver, ``loop.cursor.release`` runs in the
playbook's own database for the rows without a success. The numbers of both transactions in that database are recorded
before they commit, and their status is read there: so each row is released once, whichever process dies in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.engine.loops.loop_run import LoopRun
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import CredentialError, NoetlError, StorageError, TemplateError, ToolError
from noetl_dagster.events.connection import DATABASE_ERRORS
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope, from_result
from noetl_dagster.events.queries import end_of
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import FrameProcess, Task
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.sql.connection import open_pool, postgres_errors
from noetl_dagster.tools.sql.running import prepare_statements, run_statements
from noetl_dagster.worker.command import Outcome
from noetl_dagster.worker.execution import Execution, Visit

logger = logging.getLogger(__name__)

LEASE_SECONDS = 300.0
"""How long the driver of a frame may be silent, unless the playbook specifies it."""

BEATS_A_LEASE = 3

RELEASED = "CLAIM_RELEASED"
"""Code of the end of a command whose row was released: it is no result of the row, which is claimed again."""

UNFINISHED = frozenset({RELEASED, "EXECUTION_CANCELLED", "LEASE_EXPIRED"})
"""Codes of commands that were ended by another process."""

TRIES = 20
PAUSE_SECONDS = 0.25
"""How often, and how long apart, a frame is checked whose claim, or an earlier release, has not ended."""

PATIENT_TRIES = 4
"""Tries before the session of a claim that has not ended is terminated."""

KEEP = """
INSERT INTO noetl.cursor_frame
    (execution_id, loop_id, first_index, step, visit, rows, by_row, lease_until, claim_xid)
VALUES ($1, $2, $3, $4, $5, $6, $7, now() + make_interval(secs => $8), $9)
"""
FORGET = "DELETE FROM noetl.cursor_frame WHERE execution_id = $1 AND loop_id = $2 AND first_index = $3"

# An expired lease stays expired: its rows are being released.
BEAT = """
UPDATE noetl.cursor_frame SET lease_until = now() + make_interval(secs => $3)
WHERE execution_id = $1 AND loop_id = $2 AND lease_until > now()
"""

# Frames to release: all runs of a loop, or those whose lease has expired.
OF_LOOPS = """
SELECT execution_id, loop_id, first_index, step, visit, rows, by_row FROM noetl.cursor_frame
WHERE execution_id = $1 AND loop_id = ANY($2::text[]) ORDER BY loop_id, first_index
"""
EXPIRED = """
SELECT execution_id, loop_id, first_index, step, visit, rows, by_row FROM noetl.cursor_frame
WHERE lease_until <= now() AND ($1::bigint IS NULL OR execution_id = $1)
ORDER BY execution_id, loop_id, first_index
"""
EXPIRE = "UPDATE noetl.cursor_frame SET lease_until = now() WHERE execution_id = $1"

# The latest command of each row of a frame, and how it ended.
COMMANDS = f"""
SELECT issued.current_index, (issued.meta ->> 'attempt')::int AS attempt, ended.result
FROM (
    SELECT DISTINCT ON (current_index) current_index, meta FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'loop_id' = $2 AND meta ? 'loop_id' AND event_type = 'command.issued'
      AND current_index >= $3 AND current_index < $3 + $4
    ORDER BY current_index, (meta ->> 'attempt')::int DESC) issued
LEFT JOIN LATERAL (
    SELECT result FROM noetl.event WHERE {end_of("$1", "issued.meta ->> 'command_id'", "event")} LIMIT 1) ended ON true
ORDER BY current_index
"""

STILL_THERE = """
SELECT claim_xid, release_xid FROM noetl.cursor_frame WHERE execution_id = $1 AND loop_id = $2 AND first_index = $3
"""
# One process at a time releases a frame: the one that replaced the number of the transaction before with its own.
NOTE_RELEASE = """
UPDATE noetl.cursor_frame SET release_xid = $5
WHERE execution_id = $1 AND loop_id = $2 AND first_index = $3 AND release_xid IS NOT DISTINCT FROM $4
RETURNING true
"""

# In the playbook's database. A transaction so old that the server forgot it counts as committed, as nearly all are.
OWN_TRANSACTION = "SELECT txid_current()"
TRANSACTION_STATUS = "SELECT COALESCE(txid_status($1), 'committed')"
# a server may keep the session of a client that is gone for hours, and with it the locks of the claimed rows
TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_xid::text::bigint = $1 & 4294967295 AND datname = current_database()
"""


class Frames:
    """The frames of one run of a cursor loop."""

    def __init__(self, loop_run: LoopRun) -> None:
        frame = loop_run.program.loop.frame
        self._runtime = loop_run.runtime
        self._loop_run = loop_run
        self._by_row = frame.process is FrameProcess.ROW
        self._lease = frame.lease_seconds or LEASE_SECONDS
        # at least twice a lease, also against the playbook: one heartbeat may be late
        self._pause = min(frame.heartbeat_seconds or self._lease / BEATS_A_LEASE, self._lease / 2)

    async def keep(self, rows: list[Any], first_index: int, claim_xid: int, events: Sequence[Event]) -> None:
        """Writes a frame together with the events that issue its commands, unless the execution was cancelled."""
        runtime, loop_run = self._runtime, self._loop_run
        key = (loop_run.execution.id, loop_run.loop_id, first_index)
        place = (loop_run.step, loop_run.number)
        async with runtime.pool.acquire() as connection, connection.transaction():
            await runtime.log.append(events, connection=connection)
            await connection.execute(KEEP, *key, *place, rows, self._by_row, self._lease, claim_xid)

    async def forget(self, first_index: int) -> None:
        """Deletes a frame whose rows need no release. The log has their ends before."""
        loop_run = self._loop_run
        await self._runtime.buffer.flush(loop_run.execution.id)
        await self._runtime.pool.execute(FORGET, loop_run.execution.id, loop_run.loop_id, first_index)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Keeps the leases of all frames while the block runs."""
        beats = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            await cancel_and_wait(beats)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            with contextlib.suppress(*DATABASE_ERRORS):
                await self._runtime.pool.execute(BEAT, self._loop_run.execution.id, self._loop_run.loop_id, self._lease)


async def cursor_call(
    runtime: Runtime,
    visit: Visit,
    name: str,
    sql: str | None,
    parameters: dict[str, Any],
    scope: Scope,
    named: Scope,
) -> ToolCall:
    """Makes a call of a cursor loop's SQL in the playbook's database.

    Args:
        parameters: the parameters of the SQL.
        named: the names of its templates; ``scope`` has those of ``auth``.
    """
    cursor, fetch = visit.program.loop.cursor, runtime.results.get
    assert cursor is not None
    return ToolCall(
        execution_id=visit.execution.id,
        step=visit.step,
        task=Task(name=name, kind=cursor.kind, config={"database": cursor.database}),
        config={
            "command": await render_async(compile_value(sql), named, fetch),
            "database": await render_async(compile_value(cursor.database), scope, fetch),
        },
        input=parameters,
        auth=await render_async(compile_value(cursor.auth), scope, fetch),
        scope=scope,
        folder=visit.execution.folder,
        services=visit.execution.services,
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """Rows that were claimed together: a row of ``noetl.cursor_frame``."""

    execution_id: int
    loop_id: str
    first_index: int
    step: str
    visit: int
    rows: list[Any]
    by_row: bool

    @property
    def key(self) -> tuple[int, str, int]:
        """The row's primary key."""
        return self.execution_id, self.loop_id, self.first_index

    @property
    def items(self) -> list[list[Any]]:
        """The rows of each command."""
        return [[row] for row in self.rows] if self.by_row else [self.rows]


async def release_frames(runtime: Runtime, execution_id: int, loop_ids: Sequence[str]) -> int:
    """Releases the rows without a success of all runs of a loop, whatever their leases; returns the number of frames.

    Raises:
        NoetlError: a frame could not be released; the others are.
    """
    released, failures = await _release(runtime, OF_LOOPS, execution_id, list(loop_ids))
    for _, error in failures:
        raise error
    return released


async def release_expired(runtime: Runtime, execution_id: int | None = None) -> int:
    """Releases frames whose lease has expired: of cancelled executions, and of silent drivers.

    A frame that cannot be released is left for the next time.
    """
    released, failures = await _release(runtime, EXPIRED, execution_id)
    for frame, error in failures:
        logger.warning(
            "execution %s: step %s: rows that it had claimed were not given back, the reaper tries again: %s",
            frame.execution_id,
            frame.step,
            error,
        )
    return released


async def _release(runtime: Runtime, query: str, *parameters: Any) -> tuple[int, list[tuple[Frame, NoetlError]]]:
    """Returns how many frames were released, and which could not be: one must not hold up the others."""
    released = 0
    failures: list[tuple[Frame, NoetlError]] = []
    executions: dict[int, Execution] = {}
    for record in await runtime.pool.fetch(query, *parameters):
        frame = Frame(**record)
        try:
            if frame.execution_id not in executions:
                executions[frame.execution_id] = await runtime.load(frame.execution_id)
            visit = executions[frame.execution_id].visit(frame.step, frame.visit)
            released += await _FrameRelease(runtime, visit, frame).run()
        except NoetlError as error:
            failures.append((frame, error))
        except (LookupError, TypeError) as error:
            place = f"noetl.cursor_frame (loop {frame.loop_id}, first_index {frame.first_index})"
            advice = "correct it, or delete it and release its rows by hand"
            damaged = f"step {frame.step}: the row of {place} cannot be read: {error!r}; {advice}"
            failures.append((frame, ToolError(damaged, kind="loop")))
    return released, failures


def is_unfinished(envelope: Envelope) -> bool:
    """Reports that a command was ended by another process, so that its rows are not processed."""
    return (envelope.get("error") or {}).get("code") in UNFINISHED


@dataclass(frozen=True, slots=True)
class _FrameRelease:
    """The release of a frame: the loop's SQL runs once for each row, with the row's columns as names."""

    runtime: Runtime
    visit: Visit
    frame: Frame

    async def run(self) -> bool:
        """Returns true if rows were released.

        Raises:
            ToolError: a transaction of the frame is still open; releasing it later may succeed.
        """
        for number in range(TRIES):
            released = await self._try(terminates=number >= PATIENT_TRIES)
            if released is not None:
                return released
            await asyncio.sleep(PAUSE_SECONDS)
        raise ToolError(
            f"step {self.frame.step}: rows that its loop had claimed cannot be released, since a transaction that "
            "claims or releases them is still open in their database; end its session there, or resume later",
            kind="loop",
            retryable=True,
        )

    async def _try(self, *, terminates: bool) -> bool | None:
        """Returns true if rows were released, and None while the claim or a release is in progress.

        Args:
            terminates: whether to terminate the session of a claim that is in progress: its driver is gone or too late.
        """
        pool = self.runtime.pool
        transactions = await pool.fetchrow(STILL_THERE, *self.frame.key)
        if transactions is None:
            return False
        await self._end_commands()
        claimed = await self._status_of(transactions["claim_xid"])
        if claimed == "in progress":
            if terminates:
                await self._query(TERMINATE, transactions["claim_xid"])
            return None
        if claimed == "committed":
            before = transactions["release_xid"]
            done = "aborted" if before is None else await self._status_of(before)
            if done == "in progress":
                return None
            if done == "aborted" and not await self._release_rows(before):
                return None
        await pool.execute(FORGET, *self.frame.key)
        return bool(claimed == "committed")

    async def _commands(self) -> list[Any]:
        records = await self.runtime.pool.fetch(COMMANDS, *self.frame.key, len(self.frame.items))
        return list(records)

    async def _end_commands(self) -> None:
        """Ends the unfinished commands: a process that still runs one is too late with its end and its sink."""
        runtime, frame = self.runtime, self.frame
        released = ToolError(
            f"step {frame.step}: the claim of its rows ended before they did; they were given back",
            kind="loop",
            code=RELEASED,
        )
        ends = []
        for record in await self._commands():
            if record["result"] is None:
                attempt, index = record["attempt"], record["current_index"]
                command = self.visit.command(attempt=attempt, index=index, loop_id=frame.loop_id)
                ends.append(runtime.commands.ended(command, Outcome(error_envelope(released))))
        await runtime.handler.handle_events(ends)

    async def _status_of(self, xid: int) -> str:
        """Returns the status of a transaction in the playbook's database: committed, aborted or in progress."""
        return str(await self._query(TRANSACTION_STATUS, xid))

    async def _query(self, sql: str, xid: int) -> Any:
        """Returns the first value of a query about a transaction in the playbook's database."""
        call = await self._call(None)
        with postgres_errors(call):
            pool = await open_pool(call, self.runtime.tool_context)
            return await pool.fetchval(sql, xid)

    async def _release_rows(self, before: int | None) -> bool:
        """Releases rows whose commands did not succeed; false if another process began to since ``before``.

        The transaction's number is recorded first: from then on other processes wait for its end.
        """
        runtime, context, frame = self.runtime, self.runtime.tool_context, self.frame
        rows = [
            row
            for record in await self._commands()
            if from_result(record["result"])["status"] != OK
            for row in frame.items[record["current_index"] - frame.first_index]
        ]
        try:
            calls = [await self._call(row) for row in rows]
            if not calls:
                return True
            with postgres_errors(calls[0]):
                pool = await open_pool(calls[0], context)
                async with pool.acquire() as connection, connection.transaction():
                    xid = await connection.fetchval(OWN_TRANSACTION)
                    if not await runtime.pool.fetchval(NOTE_RELEASE, *frame.key, before, xid):
                        return False
                    for call in calls:
                        await run_statements(connection, await prepare_statements(call, context))
            return True
        except (
            ToolError,
            TemplateError,
            CredentialError,
            StorageError,
            asyncpg.InvalidCachedStatementError,
        ) as error:
            raise ToolError(
                f"step {frame.step}: loop.cursor.release failed: {error}",
                kind="loop",
                retryable=bool(getattr(error, "retryable", True)),
            ) from error

    async def _call(self, row: Any) -> ToolCall:
        """Makes the call that releases a row; without a row, one that only names the database."""
        loop, scope = self.visit.program.loop, self.visit.scope(ReferenceCache())
        columns = dict(row) if isinstance(row, Mapping) else {}
        named, sql = scope.with_locals({**columns, loop.iterator: row}), None
        if row is not None and loop.cursor is not None:
            sql = loop.cursor.release
        return await cursor_call(self.runtime, self.visit, "release", sql, columns, scope, named)
