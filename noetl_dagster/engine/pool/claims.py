"""Claims of queued commands: who asks first gets one, in one short transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import Event
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.worker.context import CommandContext, Grant

Observe = Callable[[str, str, Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class Granted:
    """Commands of one step that were claimed together.

    Attributes:
        waited: how long each was in the queue, in seconds.
        state_version: as in ``Grant``.
        answer: what their worker is told, as JSON: a ``ClaimedGroup``.
    """

    execution_id: int
    step: str
    tool_kind: str
    waited: Sequence[float]
    state_version: str
    answer: str


class Claims:
    """Hands out queued commands.

    Args:
        lease_seconds: how long a claim lasts without a heartbeat.
        observe: told of each step whose commands were claimed, with their tool kind and the seconds that each
            was in the queue.
    """

    def __init__(self, pool: asyncpg.Pool, lease_seconds: float, observe: Observe | None = None) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._observe = observe

    async def claim(
        self, execution_id: int, command_id: str, worker_id: str, event_id: int, pool: str = DEFAULT_POOL
    ) -> Grant | None:
        """Claims a command and writes ``command.claimed``; None when it is another's, has ended or is unknown.

        Args:
            pool: of the worker; commands of others are not for it.
            event_id: id of the ``command.claimed`` event, made by the worker: asking again with it gives
                the same answer.
        """
        record = await self._pool.fetchrow(
            queries.CLAIM, execution_id, command_id, worker_id, event_id, self._lease_seconds, pool
        )
        if record is None:
            return None
        if self._observe is not None:
            self._observe(record["node_name"], record["tool_kind"], [record["waited"]])
        return self._grant(record)

    async def claim_many(
        self,
        worker_id: str,
        event_ids: Sequence[int],
        limits: Mapping[str, int] | None = None,
        pool: str = DEFAULT_POOL,
    ) -> list[Granted]:
        """Claims as many commands of a pool as there are ``event_ids``, or fewer when no more wait.

        Args:
            event_ids: ids of the ``command.claimed`` events, made by the worker: asking again with the same
                ones gives the same answer.
            limits: most commands by tool kind, where a kind has fewer places than there are ids.
        """
        records = await self._pool.fetch(
            queries.CLAIM_MANY, worker_id, event_ids, self._lease_seconds, dict(limits or {}), pool
        )
        granted = [Granted(*record) for record in records]
        if self._observe is not None:
            for one in granted:
                self._observe(one.step, one.tool_kind, one.waited)
        return granted

    def answer(
        self,
        granted: Sequence[Granted],
        states: Mapping[int, Sequence[Event]] | None = None,
        pool: str = DEFAULT_POOL,
    ) -> bytes:
        """A ``Batch`` as JSON: PostgreSQL has written its groups.

        Args:
            states: events of the executions that the worker does not know as they are.
        """
        groups = ",".join(one.answer for one in granted)
        told = {str(one): list(map(message_of, events)) for one, events in (states or {}).items()}
        head = f'{{"lease_seconds":{self._lease_seconds},"pool":"{pool}","groups":[{groups}],"states":'
        return head.encode() + encode_json(told) + b"}"

    async def hand_back(self, worker_id: str, event_ids: Sequence[int]) -> int:
        """Gives claims back that a worker has not begun, by the ids of their ``command.claimed`` events.

        Returns:
            How many are in the queue again.
        """
        return len(await self._pool.fetch(queries.HAND_BACK, worker_id, event_ids))

    async def queued(self, name: str) -> Grant | None:
        """A command that waits or runs, by its id or that of its ``command.issued`` event, without claiming it."""
        number, colon, _ = name.partition(":")  # a command's id begins with its execution's
        if not (number.isascii() and number.isdecimal() and int(number) < 2**63):
            return None
        if colon:
            record = await self._pool.fetchrow(queries.QUEUED_COMMAND, int(number), name)
        else:
            record = await self._pool.fetchrow(queries.QUEUED_EVENT, int(number))
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
