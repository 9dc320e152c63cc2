"""A stream of events that waits for a killed ingestor for a moment only."""

from __future__ import annotations

import pytest

from noetl_dagster.events.transport import nats as streams
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.settings import Settings


async def redelivered_after(settings: Settings, seconds: float) -> None:
    """Makes stream and consumer, before anybody else does: what a dead ingestor had taken comes again so soon."""
    client = await connect(settings, "test")
    stream = client.jetstream()
    await streams.ensure_stream(stream, NatsNames(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "ACK_SECONDS", seconds)
        await streams.ensure_ingest_consumer(stream, NatsNames(settings))
    await client.close()
