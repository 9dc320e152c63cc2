"""Finds claims of silent workers: requeues the command, or ends it after its last attempt.

A claim is a lease in ``noetl.queue``; heartbeats extend it. Commands that the driver of an execution runs itself
have no lease: they resume with the execution.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import asyncpg
from pydantic import ValidationError

from noetl_dagster.errors import NoetlError, ToolError, first_invalid
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.types import Event
from noetl_dagster.worker.command import CommandEvents, Outcome
from noetl_dagster.worker.context import CommandContext
from noetl_dagster.worker.running import remove_orphans

logger = logging.getLogger(__name__)

BATCH = 500
"""Leases handled in one transaction."""

REAP_SECONDS = 10.0
"""Longest time between two passes; a third of a lease if that is shorter."""

_STALE = """
SELECT execution_id, command_id FROM noetl.queue
WHERE status = 'leased' AND lease_until < now() AND {condition} AND {{of}}
ORDER BY lease_until LIMIT $1
FOR UPDATE SKIP LOCKED
"""

_OF_EXECUTIONS = "execution_id = ANY($2::bigint[])"

# Expired leases with attempts left go back to the queue. Any worker may claim them; the last holder remains, whose end
# counts until then.
REQUEUE = f"""
WITH stale AS ({_STALE.format(condition="attempts < max_attempts")})
UPDATE noetl.queue SET status = 'queued', lease_until = NULL, available_at = now()
FROM stale
WHERE queue.execution_id = stale.execution_id AND queue.command_id = stale.command_id
RETURNING queue.command_id, queue.attempts, queue.pool
"""

# Expired leases without attempts left.
EXHAUSTED = f"""
WITH stale AS ({_STALE.format(condition="attempts >= max_attempts")})
SELECT queue.execution_id, queue.command_id, queue.worker_id, queue.attempts, queue.node_name,
    queue.shared || queue.context AS context
FROM stale
JOIN noetl.queue ON queue.execution_id = stale.execution_id AND queue.command_id = stale.command_id
"""

# Commands of executions that have ended are not needed any more.
WITHDRAW_ENDED = """
DELETE FROM noetl.queue USING noetl.execution
WHERE execution.execution_id = queue.execution_id AND execution.status IN ('COMPLETED', 'CANCELLED')
  AND (queue.status = 'queued' OR queue.lease_until < now())
RETURNING queue.command_id
"""

OVERDUE = """
SELECT (SELECT count(*) FROM noetl.queue WHERE status = 'leased' AND lease_until < now())
     + (SELECT count(*) FROM noetl.cursor_frame WHERE lease_until <= now())
"""
FRAMES_OVERDUE = "SELECT EXISTS (SELECT FROM noetl.cursor_frame WHERE lease_until <= now())"


@dataclass(frozen=True, slots=True)
class Requeued:
    """A command that waits for a worker again; ``attempts`` workers have claimed it so far."""

    command_id: str
    attempts: int
    pool: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """The outcome of one pass of the reaper."""

    requeued: tuple[Requeued, ...] = ()
    failed: tuple[str, ...] = ()
    withdrawn: int = 0
    released: int = 0

    def __str__(self) -> str:
        text = (
            f"{len(self.requeued)} silent commands given to others, {len(self.failed)} failed, "
            f"{self.withdrawn} of ended executions withdrawn"
        )
        return f"{text}, rows of {self.released} claims of cursors given back" if self.released else text


Release = Callable[[], Awaitable[int]]
"""Releases the rows of cursors' claims that have expired; returns the number of claims."""


@dataclass(frozen=True, slots=True)
class Reaper:
    """Ends claims of workers that crashed or hang. Any number of reapers may run at the same time.

    Workers find requeued commands in the queue. Without ``release`` other reapers release the rows of cursors' claims.
    """

    pool: asyncpg.Pool
    handler: EventHandler
    commands: CommandEvents
    release: Release | None = None

    async def overdue(self) -> int:
        """Returns the number of expired leases, of commands and of cursors' claims."""
        return int(await self.pool.fetchval(OVERDUE))

    async def reap(self) -> Reaped:
        """Handles every expired lease."""
        withdrawn, released = len(await self.pool.fetch(WITHDRAW_ENDED)), 0
        requeued, failed = await self.reclaim()
        if self.release is not None and await self.pool.fetchval(FRAMES_OVERDUE):
            try:
                released = await self.release()
            except NoetlError as error:  # the next pass tries again
                logger.warning("rows that a cursor loop had claimed were not given back: %s", error)
        return Reaped(tuple(requeued), tuple(failed), withdrawn, released)

    async def reclaim(self, executions: Collection[int] | None = None) -> tuple[list[Requeued], list[str]]:
        """Handles the expired leases of commands (of these ``executions``); returns those that wait or have failed."""
        of = {"of": "true" if executions is None else _OF_EXECUTIONS}
        values = (BATCH,) if executions is None else (BATCH, list(executions))
        requeued, failed = list[Requeued](), list[str]()
        while rows := await self.pool.fetch(REQUEUE.format(**of), *values):
            requeued.extend(Requeued(**row) for row in rows)
        while names := await self._fail_exhausted(EXHAUSTED.format(**of), *values):
            failed.extend(names)
        if failed:  # their workers are gone, and no process removes their leftovers
            await remove_orphans(self.pool)
        return requeued, failed

    async def run(self, lease: float) -> None:
        """Handles expired leases until it is cancelled; ``lease`` is their duration in seconds."""
        while True:
            try:
                reaped = await self.reap()
            except Exception as error:  # an outage; and a defect must not end the reaper
                logger.warning("claims that have expired cannot be released now: %r", error)
            else:
                if reaped != Reaped():
                    logger.warning("%s", reaped)
            await asyncio.sleep(min(REAP_SECONDS, lease / 3))

    async def _fail_exhausted(self, exhausted: str, *values: Any) -> list[str]:
        """Ends commands that no worker finished; their ends remove them from the queue."""
        async with self.pool.acquire() as connection, connection.transaction():
            rows = await connection.fetch(exhausted, *values)
            if rows:
                await self.handler.handle_events([self._failure(row) for row in rows], connection=connection)
            return [row["command_id"] for row in rows]

    def _failure(self, row: Any) -> Event:
        note = ""
        try:
            context = CommandContext.model_validate(row["context"])
        except ValidationError as malformed:  # the other commands of the batch do not depend on it
            context = CommandContext(step=row["node_name"])
            note = f"; its row in noetl.queue is malformed: {first_invalid(malformed, 'context')}"
        error = ToolError(
            f"command {row['command_id']}: {row['attempts']} workers in turn claimed it and fell silent, the last was "
            f"{row['worker_id']}; look for crashes and memory limits of the workers, or raise spec.max_attempts{note}",
            kind="worker",
            code="LEASE_EXPIRED",
            retryable=True,
        )
        command = context.command(row["execution_id"], None)
        event = self.commands.ended(command, Outcome(error_envelope(error)), final=context.final)
        event.meta |= {**context.meta, "command_id": row["command_id"], "claim": row["attempts"]}
        event.node_name, event.worker_id, event.duration = row["node_name"], row["worker_id"], None
        return event
