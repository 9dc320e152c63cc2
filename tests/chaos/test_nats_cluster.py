"""Servers of a NATS cluster are killed in the middle of a fan-out: nothing is lost, and nothing runs twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.settings import EventTransport, Settings, StoreTier
from noetl_dagster.storage.tiers import open_tier
from tests.chaos.nats_cluster import SERVERS, NatsCluster, nats_cluster
from tests.pool import working
from tests.service.conftest import serving
from tests.whole import Fan, warm


@asynccontextmanager
async def clustered(settings: Settings) -> AsyncIterator[tuple[NatsCluster, Settings, Engine]]:
    """A driver, two workers and the HTTP API with its ingestor, which use a cluster."""
    with nats_cluster() as cluster:
        await cluster.start()
        own = settings.model_copy(
            update={
                **{"nats_url": cluster.urls, "nats_replicas": SERVERS, "event_transport": EventTransport.NATS},
                **{"worker_heartbeat_seconds": 20.0, "command_heartbeat_timeout_seconds": 600.0},
            }
        )
        async with serving(own) as service:
            engine = await Engine.open(service.settings)
            async with working(service.settings, "w1", worker_slots=4), working(service.settings, "w2", worker_slots=4):
                await warm(engine)
                yield cluster, service.settings, engine
            await engine.close()


@pytest.mark.parametrize(
    ("items", "kills"),
    [(100, 1), pytest.param(3_000, 6, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
async def test_the_leader_is_killed(settings: Settings, tmp_path: Path, items: int, kills: int) -> None:
    """Results have as many copies as events."""
    async with clustered(settings) as (cluster, own, engine):
        stream, tier = NatsNames(own).event_stream, open_tier(StoreTier.KV, own, None)
        uri = await tier.put("one", b"1")
        results = f"KV_{own.nats_namespace}_results"
        client = await connect(own, "test")
        assert (await client.jetstream().stream_info(results)).config.num_replicas == SERVERS
        await client.close()
        fan = await Fan.start(engine, tmp_path, items)
        for number in range(kills):
            await fan.until_done((number + 1) * items // (kills + 2))
            leader = await cluster.leader_of(stream)
            assert not fan.is_over, "it was to be killed in the middle"
            cluster.kill(leader)
            await cluster.leader_of(stream)
            cluster.launch(leader)
        await fan.is_whole()
        cluster.kill(await cluster.leader_of(results))
        assert bytes(await tier.get(uri)) == b"1"
        await tier.close()


@pytest.mark.slow
async def test_a_cluster_without_a_majority_is_an_outage(settings: Settings, tmp_path: Path) -> None:
    async with clustered(settings) as (cluster, _, engine):
        fan = await Fan.start(engine, tmp_path, 300)
        await fan.until_done(60)
        assert not fan.is_over, "it was to be killed in the middle"
        lost = [*cluster.servers][:2]
        for name in lost:
            cluster.kill(name)
        assert not await cluster.stores()
        for name in lost:
            cluster.launch(name)
        await fan.is_whole()
