"""A worker's requests to the control plane, over HTTP or by function call, and its cache of executions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from pydantic import BaseModel

from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.log import EventLog, StoredPlaybook
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.transport.capacity import WorkerReport, put_worker
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.wire import EventMessage, kept_event
from noetl_dagster.events.types import Event
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import DEFAULT_POOL
from noetl_dagster.values import encode_json
from noetl_dagster.worker.context import Batch, Grant
from noetl_dagster.worker.execution import Execution

RELEASE_SECONDS = 5.0
"""A stopping worker waits no longer for the control plane: its claims expire anyway."""

MOST_CACHED = 64

_PATIENCE = RetryLimits(DATABASE_AWAY, seconds=300.0)


@dataclass(frozen=True, slots=True)
class DirectControl:
    """For workers that share the event log's database.

    Attributes:
        announce: tells all workers of the pool that so many commands wait again.
        pool: the worker's.
    """

    log: EventLog
    lease_seconds: float
    announce: Callable[[int], Awaitable[None]]
    pool: str = DEFAULT_POOL

    async def report(self, report: WorkerReport) -> None:
        """Writes a report."""
        await put_worker(self.log.pool, report)

    register = report

    async def claim(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], versions: Mapping[int, str]
    ) -> Batch:
        """Claims as many commands as there are ids, or fewer; claiming again with the same ids changes nothing.

        Args:
            limits: maximum of commands by tool kind, for kinds with a limit.
            versions: those of executions whose states the worker has; here it loads the others itself.
        """
        claims = Claims(self.log.pool, self.lease_seconds)
        claim = partial(claims.claim, worker_id, event_ids, limits, self.pool)
        # jsonb writes large floats with all their zeros, which pydantic would take for integers
        return Batch.model_validate(orjson.loads(claims.answer(await with_retries(claim, _PATIENCE))))

    async def release(self, worker_id: str, event_ids: Sequence[int]) -> None:
        """Releases claims that were not begun, and announces the commands to all."""
        queued = await Claims(self.log.pool, self.lease_seconds).release(worker_id, event_ids, self.pool)
        if queued:
            await self.announce(queued)

    async def lifecycle(self, execution_id: int) -> list[Event]:
        """Returns the events that the state of an execution is folded from, in order."""
        return await self.log.lifecycle(execution_id)

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Returns a playbook that was run."""
        return await self.log.source(catalog_id)

    async def close(self) -> None:
        """Does nothing: the pool belongs to the process."""


class _EventPage(BaseModel):
    """A page of an execution's events."""

    events: list[EventMessage]
    more: bool


class _Source(BaseModel):
    """A playbook of the catalog."""

    source: str
    path: str
    model: str | None = None


class HttpControl:
    """Over the HTTP API, for a worker of a pool; the methods are those of :class:`DirectControl`."""

    def __init__(self, client: ApiClient, pool: str = DEFAULT_POOL) -> None:
        self._client = client
        self._pool = pool

    async def register(self, report: WorkerReport) -> None:
        """Posts the first report."""
        content = report.model_dump_json().encode()
        (await self._client.request("POST", "/api/workers", content=content)).checked()

    async def claim(
        self, worker_id: str, event_ids: Sequence[int], limits: Mapping[str, int], versions: Mapping[int, str]
    ) -> Batch:
        """Claims commands; their unknown states come with the answer."""
        content = encode_json(self._request(worker_id, event_ids) | {"limits": limits, "known": versions})
        response = await self._client.request("POST", "/api/commands/claim", content=content)
        return response.read(Batch)

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
        events: list[Event] = []
        more = True
        while more:
            after = events[-1].event_id if events else 0
            response = await self._client.request("GET", f"/api/executions/{execution_id}/lifecycle?after={after}")
            if response.status == 404:
                raise ExecutionNotFoundError(f"no execution {execution_id} in the event log")
            page = response.read(_EventPage)
            events += map(kept_event, page.events)
            more = page.more and bool(page.events)
        return events

    async def source(self, catalog_id: int) -> StoredPlaybook | None:
        """Fetches a playbook."""
        response = await self._client.request("GET", f"/api/catalog/{catalog_id}")
        if response.status == 404:
            return None
        stored = response.read(_Source)
        return StoredPlaybook(stored.source, stored.path, stored.model)

    async def close(self) -> None:
        """Closes the client."""
        await self._client.close()

    def _request(self, worker_id: str, event_ids: Sequence[int]) -> dict[str, object]:
        return {"worker_id": worker_id, "event_ids": [str(one) for one in event_ids], "pool": self._pool}


ControlPlane = DirectControl | HttpControl


class Executions:
    """A worker's cache of executions: each is loaded once per version, however many of its commands run at once."""

    def __init__(self, runtime: Runtime, control: ControlPlane) -> None:
        self._runtime = runtime
        self._control = control
        self._loads: OrderedDict[int, tuple[str, asyncio.Task[Execution]]] = OrderedDict()

    def versions(self) -> dict[int, str]:
        """Returns the versions of the cached executions: the answer to a claim omits their states."""
        return {execution_id: version for execution_id, (version, _) in self._loads.items()}

    def learn(self, execution_id: int, version: str, events: Sequence[Event]) -> None:
        """Stores the state that came with a claim."""
        if self._loading(execution_id, version) is None:
            self._load(execution_id, version, events)

    async def of(self, grant: Grant) -> Execution:
        """Returns the execution in the version in which the command was claimed.

        Raises:
            NoetlError: it cannot be loaded, or its playbook is invalid.
        """
        loading = self._loading(grant.execution_id, grant.state_version)
        if loading is None:
            loading = self._load(grant.execution_id, grant.state_version)
        self._loads.move_to_end(grant.execution_id)
        return await asyncio.shield(loading)

    def _loading(self, execution_id: int, version: str) -> asyncio.Task[Execution] | None:
        """Returns the task that loads or has loaded a version; None if there is none, or it has failed."""
        loaded_version, loading = self._loads.get(execution_id, ("", None))
        if loading is None or loaded_version != version:
            return None
        failed = loading.done() and (loading.cancelled() or loading.exception() is not None)
        return None if failed else loading

    def _load(self, execution_id: int, version: str, events: Sequence[Event] | None = None) -> asyncio.Task[Execution]:
        loading = asyncio.create_task(self._assemble(execution_id, events))
        self._loads[execution_id] = (version, loading)
        self._loads.move_to_end(execution_id)
        while len(self._loads) > MOST_CACHED:
            self._loads.popitem(last=False)
        return loading

    async def _assemble(self, execution_id: int, events: Sequence[Event] | None) -> Execution:
        if events is None:
            events = await self._control.lifecycle(execution_id)
        state = ExecutionState.fold(execution_id, events)
        return await self._runtime.assemble(state, self._control.source)
