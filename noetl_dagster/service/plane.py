"""The open connections and components of the service, and the dependency that passes them to a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.engine.pool.claims import Claims, States
from noetl_dagster.events.transport import queries
from noetl_dagster.events.transport.capacity import CapacityListener
from noetl_dagster.events.transport.dead_letters import DeadLetters
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsClient, connect
from noetl_dagster.events.transport.wire import EventLimits
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.catalog import Catalog
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.service.checking import PlaybookChecker
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.service.tokens import Principal
from noetl_dagster.settings import Settings

ChoosePartition = Callable[[Playbook, Mapping[str, Any], str | None], Partition | None]
"""Returns the partition for a workload and an optional key; raises ``WorkloadError`` if there is no such partition."""


class Launcher(Protocol):
    """Starts what drives an execution of the log: a Dagster run, or the engine without one."""

    async def connect(self) -> None:
        """Prepares for the first execution."""

    async def check(self, playbook: Playbook, runner: Runner = Runner.DAGSTER) -> None:
        """Raises a ``NoetlError`` with the reason if it cannot launch a playbook; called before an execution exists."""

    async def launch(
        self,
        playbook: Playbook,
        execution_id: int,
        workload: dict[str, Any],
        priority: int = 0,
        runner: Runner = Runner.DAGSTER,
        *,
        resumed: bool = False,
    ) -> None:
        """Starts an execution without waiting for it. Of those that wait, the larger priority starts first.

        Args:
            resumed: it had a run before, and continues.
        """

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Ends the run of a cancelled execution if it would not end by itself; returns at once."""

    def failure(self, execution_id: int) -> str | None:
        """Returns the error of the latest run of an execution, if this process launched it and knows its end."""

    async def close(self) -> None:
        """Releases its resources; runs continue."""


@dataclass(slots=True)
class Plane:
    """The control plane of the service."""

    engine: Engine
    handler: EventHandler
    claims: Claims
    states: States
    catalog: Catalog
    checker: PlaybookChecker
    client: NatsClient
    capacity: CapacityListener
    ingestor: Ingestor
    dead_letters: DeadLetters
    launcher: Launcher
    choose_partition: ChoosePartition
    metrics: Metrics
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _ingesting: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, settings: Settings, launcher: Callable[[Engine], Launcher], choose_partition: ChoosePartition
    ) -> Plane:
        """Opens the engine, NATS and an ingestor: events over NATS need no further process."""
        engine = await Engine.open(settings)
        runtime = engine.runtime
        lease = settings.command_heartbeat_timeout_seconds
        client = await connect(settings, "service")
        metrics = Metrics()
        handler = EventHandler(runtime.log, lease, observe=metrics.count_ran)
        plane = cls(
            engine=engine,
            handler=handler,
            claims=Claims(runtime.pool, lease, metrics.count_waited),
            states=States(runtime.log),
            catalog=Catalog(settings.playbooks_path),
            checker=PlaybookChecker(settings),
            client=client,
            capacity=CapacityListener(client, runtime.pool),
            ingestor=Ingestor(client, handler, observe=metrics.count_ingested),
            dead_letters=DeadLetters(handler, client.names, EventLimits.of(settings)),
            launcher=launcher(engine),
            choose_partition=choose_partition,
            metrics=metrics,
        )
        await plane.capacity.open()
        await plane.ingestor.open()
        plane._ingesting = asyncio.create_task(plane.ingestor.run(plane._stop))
        return plane

    async def may_read(
        self,
        sender: Principal,
        execution_id: int | None = None,
        *,
        command_id: str | None = None,
        catalog_id: int | None = None,
    ) -> bool:
        """Returns whether a sender may read an execution, command or playbook: workers those of commands they hold."""
        if sender.reads_all:
            return True
        workers, pools = (None if names is None else list(names) for names in (sender.workers, sender.pools))
        values = (workers, pools, list(sender.reserved), execution_id, command_id, catalog_id)
        return bool(await self.engine.runtime.pool.fetchval(queries.HOLDS, *values))

    async def close(self) -> None:
        """Closes everything; events that were already fetched are committed."""
        self._stop.set()
        if self._ingesting is not None:
            with contextlib.suppress(Exception):
                await self._ingesting
        await self.launcher.close()
        await self.checker.close()
        await self.ingestor.close()
        await self.capacity.close()
        await self.client.close()
        await self.engine.close()


async def plane_of(request: Request) -> Plane:  # async, so that FastAPI needs no thread
    """Returns the plane of the application."""
    plane: Plane = request.app.state.plane
    return plane


ThePlane = Annotated[Plane, Depends(plane_of)]
