"""The NATS sensor: drains the stream, reports what finished outside of Dagster, remembers how far it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from dagster import AssetKey, DagsterInstance, SensorResult, build_sensor_context

from noetl_dagster.resources.noetl import NoetlResource, close_engines
from noetl_dagster.sensors.nats import build_event_sensor
from noetl_dagster.settings import Settings
from noetl_dagster.storage.loop import run_sync
from noetl_dagster.transport.connection import connect
from noetl_dagster.transport.names import Names
from noetl_dagster.transport.nats import NatsTransport
from tests.transport.conftest import ended, started
from tests.worker.conftest import playbook


@pytest.fixture
def noetl(settings: Settings) -> Iterator[NoetlResource]:
    yield NoetlResource.of(settings)
    close_engines()


TEXT = """
workflow:
  - step: start
    tool: {kind: python, code: "result = {'rows': 3}"}
    next: [large]
  - step: large
    tool: {kind: python, code: "result = 'x' * 50_000"}
"""


def tick(noetl: NoetlResource, instance: DagsterInstance, cursor: str | None = None) -> SensorResult:
    context = build_sensor_context(instance=instance, cursor=cursor, sensor_name="noetl_events")
    result = build_event_sensor(noetl)(context)
    assert isinstance(result, SensorResult)
    return result


def reporting_tick(
    noetl: NoetlResource, instance: DagsterInstance, cursor: str | None = None
) -> SensorResult:
    """The first tick that reports: an end is read once every older transaction of the server is over."""
    deadline = time.monotonic() + 30
    while True:
        result = tick(noetl, instance, cursor)
        if result.asset_events or time.monotonic() > deadline:
            return result
        time.sleep(0.1)


def test_a_tick_takes_events(
    noetl: NoetlResource, settings: Settings, dagster_instance: DagsterInstance
) -> None:
    engine = noetl.engine()
    first = started()
    events = [ended(first.execution_id, index) for index in range(120)]

    async def publish() -> None:
        await engine.runtime.log.append([first])
        client = await connect(settings, "test")
        await NatsTransport(client, Names.of(settings)).publish(events)
        await client.close()

    assert "0 events" in (tick(noetl, dagster_instance).skip_reason.skip_message or "")
    run_sync(publish())
    message = tick(noetl, dagster_instance).skip_reason.skip_message or ""
    assert "120 events in" in message
    assert "nothing to report" in message
    stored = run_sync(engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.event"))
    assert stored == 121


def test_executions_outside_of_dagster_become_materialisations(
    noetl: NoetlResource, dagster_instance: DagsterInstance
) -> None:
    state = run_sync(noetl.engine().run(playbook(TEXT)))
    result = reporting_tick(noetl, dagster_instance)
    assert {event.asset_key for event in result.asset_events} == {
        AssetKey(["tests", "pooled", "start"]),
        AssetKey(["tests", "pooled", "large"]),
    }
    for event in result.asset_events:
        assert event.metadata["execution_id"].value == str(state.execution_id)
    assert "2 assets of 1 executions reported" in (result.skip_reason.skip_message or "")
    again = tick(noetl, dagster_instance, result.cursor)
    assert not again.asset_events
    assert again.cursor == result.cursor


def test_an_edited_cursor_starts_anew(noetl: NoetlResource, dagster_instance: DagsterInstance) -> None:
    run_sync(noetl.engine().run(playbook(TEXT)))
    assert len(reporting_tick(noetl, dagster_instance, "what?").asset_events) == 2


def test_sensor_and_ingestor_at_once_take_nothing_twice(
    noetl: NoetlResource, settings: Settings, dagster_instance: DagsterInstance
) -> None:
    engine = noetl.engine()
    first = started()
    events = [ended(first.execution_id, index) for index in range(2_000)]

    async def publish() -> None:
        await engine.runtime.log.append([first])
        client = await connect(settings, "test")
        transport = NatsTransport(client, Names.of(settings))
        await asyncio.gather(*(transport.publish(events[at : at + 200]) for at in range(0, 2_000, 200)))
        await client.close()

    tick(noetl, dagster_instance)  # makes the stream
    run_sync(publish())
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: tick(noetl, dagster_instance), range(3)))
    messages = [result.skip_reason.skip_message or "" for result in results]
    assert sum(int(message.split()[0]) for message in messages) == 2_000, messages
    assert run_sync(engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.event")) == 2_001
