"""What the service holds open, and how a request gets at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.pool.claims import Claims
from noetl_dagster.events.transport.capacity import CapacityKeeper
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.transport.ingest import Ingestor
from noetl_dagster.events.transport.nats import NatsClient, connect
from noetl_dagster.playbook.catalog import Catalog
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings


class Launcher(Protocol):
    """Has a Dagster run drive an execution that is in the log."""

    async def check(self, playbook: Playbook) -> None:
        """Refuses a playbook that it could not launch, before there is an execution.

        Raises:
            NoetlError: why.
        """
        ...

    async def launch(
        self, playbook: Playbook, execution_id: int, workload: dict[str, Any], priority: int = 0
    ) -> None:
        """Returns as soon as the run is on its way.

        Args:
            priority: runs with a larger number start first, where they have to wait.
        """
        ...

    async def cancelled(self, playbook: str, execution_id: int) -> None:
        """Ends the run of an execution that was cancelled, where it would not end by itself; returns at once."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Plane:
    """The control plane of the service."""

    settings: Settings
    engine: Engine
    handler: EventHandler
    claims: Claims
    catalog: Catalog
    client: NatsClient
    capacity: CapacityKeeper
    ingestor: Ingestor
    launcher: Launcher
    metrics: Metrics
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _ingesting: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: Settings, launcher: Callable[[Engine], Launcher]) -> Plane:
        """Opens the engine, NATS and an ingestor: events over NATS need no further process."""
        engine = await Engine.open(settings)
        runtime = engine.runtime
        lease = settings.command_heartbeat_timeout_seconds
        client = await connect(settings, "service")
        metrics = Metrics()
        handler = EventHandler(runtime.log, lease, observe=metrics.count_ran)
        plane = cls(
            settings=settings,
            engine=engine,
            handler=handler,
            claims=Claims(runtime.pool, lease, metrics.count_waited),
            catalog=Catalog(settings.playbooks_path),
            client=client,
            capacity=CapacityKeeper(client, runtime.pool),
            ingestor=Ingestor(client, handler, observe=metrics.count_ingested),
            launcher=launcher(engine),
            metrics=metrics,
        )
        await plane.capacity.open()
        await plane.ingestor.open()
        plane._ingesting = asyncio.create_task(plane.ingestor.run(plane._stop))
        return plane

    async def close(self) -> None:
        self._stop.set()
        if self._ingesting is not None:
            with contextlib.suppress(Exception):
                await self._ingesting
        await self.launcher.close()
        await self.ingestor.close()
        await self.capacity.close()
        await self.client.close()
        await self.engine.close()


async def plane_of(request: Request) -> Plane:  # async: else FastAPI takes a thread
    plane: Plane = request.app.state.plane
    return plane


ThePlane = Annotated[Plane, Depends(plane_of)]
