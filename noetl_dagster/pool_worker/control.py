"""The synchronous requests of a worker to the control plane: over HTTP, or by function call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.buffer import RETRYABLE
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.log import EventLog, StoredPlaybook
from noetl_dagster.events.transport.capacity import WorkerReport, put_worker
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.wire import EventMessage, kept_event
from noetl_dagster.events.types import Event
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.worker.context import Batch

RELEASE_SECONDS = 5.0
"""A stopping worker waits no longer for the control plane: its claims expire anyway."""

_PATIENCE = RetryLimits(RETRYABLE, seconds=300.0)


class ControlPlane(Protocol):
    """The synchronous half of the protocol (docs/protocol.md)."""

    async def register(self, report: WorkerReport) -> None:
        """Makes a worker known."""
        ...

    async def claim(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        """Claims as many commands as there are ids, or fewer; claiming again with the same ids changes nothing.

        Args:
            limits: maximum of commands by tool kind, for kinds with a limit.
            known: versions of executions whose states the worker has.
        """
        ...

    async def release(self, worker_id: str, event_ids: Sequence[int]) -> None:
        """Releases claims that were not begun."""
        ...

    async def report(self, report: WorkerReport) -> None:
        """Writes a report, unless the API does it."""
        ...

    async def lifecycle(self, execution_id: int) -> list[Event]:
        """Returns the events that the state of an execution is folded from, in order."""
        ...

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Returns a playbook that was run."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


class DirectControl:
    """For workers that share the event log's database.

    Args:
        announce: tells all workers of the pool that so many commands wait again.
        pool: the worker's.
    """

    def __init__(
        self,
        log: EventLog,
        lease_seconds: float,
        announce: Callable[[int], Awaitable[None]],
        pool: str = DEFAULT_POOL,
    ) -> None:
        self._log = log
        self._announce = announce
        self._pool = pool
        self._claims = Claims(log.pool, lease_seconds)

    async def register(self, report: WorkerReport) -> None:
        """Writes the first report."""
        await put_worker(self._log.pool, report)

    async def claim(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        """Claims commands; the worker loads states itself."""
        claim = partial(self._claims.claim, worker_id, event_ids, limits, self._pool)
        return Batch.model_validate_json(self._claims.answer(await with_retries(claim, _PATIENCE)))

    async def report(self, report: WorkerReport) -> None:
        """Writes a report."""
        await put_worker(self._log.pool, report)

    async def release(self, worker_id: str, event_ids: Sequence[int]) -> None:
        """Releases claims and announces the commands to all."""
        queued = await self._claims.release(worker_id, event_ids)
        if queued:
            await self._announce(queued)

    async def lifecycle(self, execution_id: int) -> list[Event]:
        """Reads the events from the log."""
        return await self._log.lifecycle(execution_id)

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Reads the playbook from the catalog."""
        return await self._log.source(catalog_id)

    async def close(self) -> None:
        """Does nothing: the pool belongs to the process."""


class HttpControl:
    """Over the HTTP API, for a worker of a pool."""

    def __init__(self, client: ApiClient, pool: str = DEFAULT_POOL) -> None:
        self._client = client
        self._pool = pool

    async def register(self, report: WorkerReport) -> None:
        """Posts the first report."""
        content = report.model_dump_json().encode()
        (await self._client.request("POST", "/api/workers", content=content)).checked()

    async def claim(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], known: Mapping[int, str]
    ) -> Batch:
        """Claims commands; their unknown states come with the answer."""
        content = encode_json(self._request(worker_id, event_ids) | {"limits": limits, "known": known})
        response = await self._client.request("POST", "/api/commands/claim", content=content)
        return Batch.model_validate_json(response.checked().content)

    async def report(self, report: WorkerReport) -> None:
        """Does nothing: the API receives reports over NATS."""

    async def release(self, worker_id: str, event_ids: Sequence[int]) -> None:
        """Releases claims."""
        content = encode_json(self._request(worker_id, event_ids))
        path = "/api/commands/release"
        answer = await self._client.request("POST", path, content=content, patience=RELEASE_SECONDS)
        answer.checked()

    async def lifecycle(self, execution_id: int) -> list[Event]:
        """Fetches the events of an execution."""
        path = f"/api/executions/{execution_id}/lifecycle"
        response = await self._client.request("GET", path)
        if response.status == 404:
            raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
        return [kept_event(EventMessage.model_validate(one)) for one in response.checked().json()["events"]]

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Fetches a playbook."""
        response = await self._client.request("GET", f"/api/catalog/{catalog_id}")
        if response.status == 404:
            return None
        found = response.checked().json()
        return StoredPlaybook(found["source"], found["path"], found["model"])

    async def close(self) -> None:
        """Closes the client."""
        await self._client.close()

    def _request(self, worker_id: str, event_ids: Sequence[int]) -> dict[str, object]:
        return {"worker_id": worker_id, "event_ids": [str(one) for one in event_ids], "pool": self._pool}
