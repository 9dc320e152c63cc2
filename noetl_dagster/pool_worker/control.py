"""What a worker asks of the control plane, each time waiting for the answer: over HTTP, or by function call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol
from urllib.parse import quote

from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.errors import ExecutionNotFoundError, TransportError
from noetl_dagster.events.buffer import RETRYABLE
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.transport.capacity import WorkerReport, put_worker
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.wire import EventMessage, kept_event
from noetl_dagster.events.types import Event
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.worker.context import Batch, Grant

HAND_BACK_SECONDS = 5.0
"""A worker that goes does not wait longer for the control plane: its claims end with it."""

_ONE_POOL = "the control plane is of an earlier version, which knows one pool, not {pool!r}; update it first"

_PATIENCE = RetryLimits(RETRYABLE, seconds=300.0)


class ControlPlane(Protocol):
    """The synchronous half of the protocol (docs/protocol.md)."""

    async def register(self, report: WorkerReport) -> bool:
        """Makes a worker known; whether commands may be claimed and events sent many at once."""
        ...

    async def claim(self, execution_id: int, command_id: str, worker_id: str, event_id: int) -> Grant | None:
        """Claims a command; None when there is nothing to claim any more."""
        ...

    async def claim_many(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        """Claims as many commands as there are ids, or fewer; sent again with the same ids it changes nothing.

        Args:
            limits: most commands by tool kind, where a kind has a limit.
            known: versions of executions whose states the worker has.
        """
        ...

    async def hand_back(self, worker_id: str, event_ids: Sequence[int]) -> None:
        """Gives claims back that were not begun."""
        ...

    async def report(self, report: WorkerReport) -> None:
        """Writes a report where nobody else may do so."""
        ...

    async def lifecycle(self, execution_id: int) -> list[Event]:
        """The events that the state of an execution is folded from, in order."""
        ...

    async def source(self, catalog_id: int) -> tuple[str, str] | None:
        """Text and path of a playbook."""
        ...

    async def close(self) -> None: ...


class DirectControl:
    """For workers that share the event log's database.

    Args:
        wake: tells all workers of the pool that so many commands wait again.
        pool: the worker's.
    """

    def __init__(
        self,
        log: EventLog,
        lease_seconds: float,
        wake: Callable[[int], Awaitable[None]],
        pool: str = DEFAULT_POOL,
    ) -> None:
        self._log = log
        self._wake = wake
        self._pool = pool
        self._claims = Claims(log.pool, lease_seconds)

    async def register(self, report: WorkerReport) -> bool:
        await put_worker(self._log.pool, report)
        return True

    async def claim(self, execution_id: int, command_id: str, worker_id: str, event_id: int) -> Grant | None:
        return await self._claims.claim(execution_id, command_id, worker_id, event_id, self._pool)

    async def claim_many(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        claim = partial(self._claims.claim_many, worker_id, event_ids, limits, self._pool)
        granted = await with_retries(claim, _PATIENCE)
        return Batch.model_validate_json(self._claims.answer(granted, pool=self._pool))

    async def report(self, report: WorkerReport) -> None:
        await put_worker(self._log.pool, report)

    async def hand_back(self, worker_id: str, event_ids: Sequence[int]) -> None:
        queued = await self._claims.hand_back(worker_id, event_ids)
        if queued:
            await self._wake(queued)

    async def lifecycle(self, execution_id: int) -> list[Event]:
        return await self._log.lifecycle(execution_id)

    async def source(self, catalog_id: int) -> tuple[str, str] | None:
        return await self._log.source(catalog_id)

    async def close(self) -> None:
        """The pool belongs to the process."""


class HttpControl:
    """Over the HTTP API, for a worker of a pool."""

    def __init__(self, client: ApiClient, pool: str = DEFAULT_POOL) -> None:
        self._client = client
        self._pool = pool

    async def register(self, report: WorkerReport) -> bool:
        content = report.model_dump_json().encode()
        answer = await self._client.request("POST", "/api/workers", content=content)
        told = answer.checked().json()
        if self._pool != DEFAULT_POOL and not told.get("pools", False):
            raise TransportError(_ONE_POOL.format(pool=self._pool))
        return bool(told.get("batch", False))

    async def claim(self, execution_id: int, command_id: str, worker_id: str, event_id: int) -> Grant | None:
        body = {"execution_id": str(execution_id), "worker_id": worker_id, "event_id": str(event_id)}
        body["pool"] = self._pool
        path = f"/api/commands/{quote(command_id, safe='')}/claim"
        response = await self._client.request("POST", path, content=encode_json(body))
        if response.status in (404, 409):
            return None
        return Grant.model_validate_json(response.checked().content)

    async def claim_many(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        body = {
            "worker_id": worker_id,
            "event_ids": [str(one) for one in event_ids],
            "limits": limits,
            "known": known,
            "pool": self._pool,
        }
        content = encode_json(body)
        response = await self._client.request("POST", "/api/commands/claim", content=content)
        batch = Batch.model_validate_json(response.checked().content)
        if batch.pool != self._pool:  # one of several API processes, not updated yet
            await self.hand_back(worker_id, event_ids)
            raise TransportError(_ONE_POOL.format(pool=self._pool))
        return batch

    async def report(self, report: WorkerReport) -> None:
        """The API hears reports over NATS."""

    async def hand_back(self, worker_id: str, event_ids: Sequence[int]) -> None:
        content = encode_json(
            {"worker_id": worker_id, "event_ids": [str(one) for one in event_ids], "pool": self._pool}
        )
        path = "/api/commands/release"
        answer = await self._client.request("POST", path, content=content, patience=HAND_BACK_SECONDS)
        answer.checked()

    async def lifecycle(self, execution_id: int) -> list[Event]:
        path = f"/api/executions/{execution_id}/lifecycle"
        response = await self._client.request("GET", path)
        if response.status == 404:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        return [kept_event(EventMessage.model_validate(one)) for one in response.checked().json()["events"]]

    async def source(self, catalog_id: int) -> tuple[str, str] | None:
        response = await self._client.request("GET", f"/api/catalog/{catalog_id}")
        if response.status == 404:
            return None
        found = response.checked().json()
        return found["source"], found["path"]

    async def close(self) -> None:
        await self._client.close()
