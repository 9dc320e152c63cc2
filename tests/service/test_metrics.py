"""``/metrics`` shows what goes on, not only zeros."""

from __future__ import annotations

from noetl_dagster.transport.nats.names import Names
from noetl_dagster.transport.nats.transport import NatsTransport
from tests.service.conftest import Service
from tests.service.test_api import queue, running_execution
from tests.transport.conftest import IDS, ended
from tests.waiting import until


async def shown(service: Service) -> dict[str, float]:
    """Values of the scrape by name and labels."""
    lines = (await service.client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def test_the_queue_and_its_claims(service: Service) -> None:
    execution_id = await running_execution(service)
    first, _ = [await queue(service, execution_id, index) for index in range(2)]
    claim = {"execution_id": str(execution_id), "worker_id": "w1", "event_id": str(IDS.next())}
    path = f"/api/commands/{first.meta['command_id']}/claim"
    assert (await service.client.post(path, json=claim)).is_success
    found = await shown(service)
    assert (found["noetl_queue_depth"], found["noetl_queue_active"]) == (1, 1)


async def test_the_way_from_nats_into_the_log(service: Service) -> None:
    execution_id, names = await running_execution(service), Names.of(service.settings)
    transport = NatsTransport(service.plane.client, names)
    events = [ended(execution_id, index) for index in range(30)]
    await transport.publish(events)
    again = ended(execution_id, 0)  # of a command that has ended
    await transport.publish([again])
    await transport.publish([ended(IDS.next(), 0)])  # its execution may yet come: it waits in the stream

    async def taken() -> dict[str, float] | None:
        found = await shown(service)
        settled = found["noetl_ingest_duplicates_total"] == 1 and found["noetl_ingest_lag_messages"] == 1
        return found if settled else None

    found = await until(taken, "all events but the one that waits")
    assert found["noetl_ingested_events_total"] == 30
    assert found["noetl_ingest_latency_seconds_count"] == 31
    assert found["noetl_ingest_latency_seconds_sum"] > 0
    assert found["noetl_dead_letters"] == 0
