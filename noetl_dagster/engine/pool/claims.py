"""Claims of queued commands: who asks first gets one, in one short transaction."""

from __future__ import annotations

from typing import Any

import asyncpg

from noetl_dagster.transport import queries
from noetl_dagster.worker.context import CommandContext, Grant


class Claims:
    """Hands out queued commands.

    Args:
        lease_seconds: how long a claim lasts without a heartbeat.
    """

    def __init__(self, pool: asyncpg.Pool, lease_seconds: float) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds

    async def claim(self, execution_id: int, command_id: str, worker_id: str, event_id: int) -> Grant | None:
        """Claims a command and writes ``command.claimed``; None when it is another's, has ended or is unknown.

        Args:
            event_id: id of the ``command.claimed`` event, made by the worker: asking again with it gives
                the same answer.
        """
        record = await self._pool.fetchrow(
            queries.CLAIM, execution_id, command_id, worker_id, event_id, self._lease_seconds
        )
        return None if record is None else self._grant(record)

    async def queued(self, name: str) -> Grant | None:
        """A command that waits or runs, by its id or that of its ``command.issued`` event, without claiming it."""
        number = int(name) if name.isdecimal() and int(name) < 2**63 else -1
        record = await self._pool.fetchrow(queries.QUEUED_COMMAND, number, name)
        return None if record is None else self._grant(record)

    def _grant(self, record: Any) -> Grant:
        return Grant(
            execution_id=record["execution_id"],
            command_id=record["command_id"],
            event_id=record["event_id"],
            claim=record["attempts"],
            state_version=record["state_version"],
            lease_seconds=self._lease_seconds,
            context=CommandContext.model_validate(record["context"]),
        )
