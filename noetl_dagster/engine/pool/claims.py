"""Claims of queued commands, in one short transaction each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import Event
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.worker.context import CommandContext, Grant

Observe = Callable[[str, str, Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Commands of one step that were claimed together, the seconds that each waited, and their ``ClaimedGroup``."""

    execution_id: int
    step: str
    tool_kind: str
    waited: Sequence[float]
    state_version: str
    answer: str


class Claims:
    """Hands out queued commands for ``lease_seconds``; ``observe`` gets the seconds that those of a step waited."""

    def __init__(self, pool: asyncpg.Pool, lease_seconds: float, observe: Observe | None = None) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._observe = observe

    async def claim(
        self,
        worker_id: str,
        event_ids: Sequence[int],
        limits: Mapping[str, int] | None = None,
        pool: str = DEFAULT_POOL,
        *,
        only: Sequence[str] | None = None,
    ) -> list[ClaimRow]:
        """Claims as many commands of a pool as there are ``event_ids``, or fewer if fewer wait.

        Args:
            event_ids: ids of the ``command.claimed`` events, created by the worker: claiming again with the same
                ids returns the same answer.
            limits: maximum of commands by tool kind, for kinds with fewer slots than there are ids.
            only: ids of the only commands to claim; limits do not apply to them.
        """
        executions = None if only is None else list(map(execution_of, only))
        own = (worker_id, event_ids, self._lease_seconds, dict(limits or {}))
        records = await self._pool.fetch(queries.CLAIM, *own, pool, executions, only)
        claimed = [ClaimRow(*record) for record in records]
        if self._observe is not None:
            for one in claimed:
                self._observe(one.step, one.tool_kind, one.waited)
        return claimed

    def answer(self, claimed: Sequence[ClaimRow], states: Mapping[int, Sequence[Event]] | None = None) -> bytes:
        """Returns a ``Batch`` as JSON; PostgreSQL has written its groups. ``states`` are new to the worker."""
        groups = ",".join(one.answer for one in claimed)
        encoded = {str(one): list(map(message_of, events)) for one, events in (states or {}).items()}
        head = f'{{"lease_seconds":{self._lease_seconds},"groups":[{groups}],"states":'
        return head.encode() + encode_json(encoded) + b"}"

    async def release(self, worker_id: str, event_ids: Sequence[int], pool: str = DEFAULT_POOL) -> int:
        """Returns claims that were not begun to the queue, by their ``event_ids``; returns how many commands it has."""
        return len(await self._pool.fetch(queries.GIVE_BACK, worker_id, event_ids, pool))

    async def queued(self, name: str) -> Grant | None:
        """Returns a command that waits or runs, by its id or that of its ``command.issued`` event; claims nothing."""
        number = execution_of(name)
        if ":" in name:
            record = await self._pool.fetchrow(queries.QUEUED_COMMAND, number, name)
        else:
            record = await self._pool.fetchrow(queries.QUEUED_EVENT, number)
        if record is None:
            return None
        shown = {key: record[key] for key in ("execution_id", "command_id", "event_id", "state_version")}
        context = CommandContext.model_validate(record["context"])
        return Grant(**shown, claim=record["attempts"], lease_seconds=self._lease_seconds, context=context)


def execution_of(name: str) -> int:
    """Returns the number that a command id begins with, the id of its execution; -1 if it begins with none."""
    number = name.partition(":")[0]
    return int(number) if number.isascii() and number.isdecimal() and int(number) < 2**63 else -1
