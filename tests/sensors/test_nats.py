"""The NATS sensor: drains the stream, reports what finished outside of Dagster, remembers how far it came."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dagster import AssetCheckKey, AssetKey, AssetMaterialization, DagsterInstance, SensorResult, build_sensor_context
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from noetl_dagster.events.transport.nats import connect
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.sensors.nats_events import build_event_sensor
from noetl_dagster.settings import Settings
from tests.events.transport.conftest import ended, hold, started
from tests.playbooks import playbook
from tests.waiting import until_now


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    yield EngineProvider(settings)
    close_engines()


TEXT = """
workflow:
  - step: start
    tool: {kind: python, code: "result = {'rows': 3}"}
    next: [large]
  - step: large
    tool: {kind: python, code: "result = 'x' * 50_000"}
"""


CHECKED = """
workflow:
  - step: start
    tool: {kind: python, code: "result = {'rows': [{'n': 1}], 'row_count': 1}"}
    checks: [{row_count: 2, name: enough}]
"""


def tick(noetl: EngineProvider, instance: DagsterInstance, cursor: str | None = None) -> SensorResult:
    context = build_sensor_context(instance=instance, cursor=cursor, sensor_name="noetl_events")
    result = build_event_sensor(noetl)(context)
    assert isinstance(result, SensorResult)
    return result


def events_in(message: str) -> int:
    return int(message.split()[0])


def ticks_until(
    events: int, noetl: EngineProvider, instance: DagsterInstance, messages: list[str] | None = None
) -> list[str]:
    """Ticks until so many events are taken; a tick ends when the stream has been quiet for a moment."""
    messages = [] if messages is None else messages

    def all_taken() -> bool:
        messages.append(tick(noetl, instance).skip_reason.skip_message or "")
        return sum(map(events_in, messages)) >= events

    until_now(all_taken)
    return messages


def reporting_tick(noetl: EngineProvider, instance: DagsterInstance, cursor: str | None = None) -> SensorResult:
    """The first tick that reports: an end is read once every older transaction of the server is over."""

    def reported() -> SensorResult | None:
        result = tick(noetl, instance, cursor)
        return None if "nothing to report" in (result.skip_reason.skip_message or "") else result

    result = until_now(reported)
    assert result is not None
    return result


def publish(noetl: EngineProvider, count: int) -> None:
    """The ends of so many commands of an execution that the log knows."""
    runtime, first = noetl.engine().runtime, started()
    events = [ended(first.execution_id, index) for index in range(count)]

    async def send() -> None:
        await runtime.log.append([first])
        await hold(runtime.pool, first.execution_id, count)
        client = await connect(runtime.settings, "test")
        transport = NatsTransport(client)
        await asyncio.gather(*(transport.publish(events[at : at + 200]) for at in range(0, count, 200)))
        await client.close()

    run_sync(send())


def test_a_tick_takes_events(noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    assert "0 events" in (tick(noetl, dagster_instance).skip_reason.skip_message or "")
    publish(noetl, 120)
    messages = ticks_until(120, noetl, dagster_instance)
    assert all("nothing to report" in message for message in messages)
    stored = run_sync(noetl.engine().runtime.pool.fetchval("SELECT count(*) FROM noetl.event"))
    assert stored == 121


def test_executions_outside_of_dagster_become_materialisations(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    """An edited cursor starts anew."""
    state = run_sync(noetl.engine().run(playbook(TEXT)))
    result = reporting_tick(noetl, dagster_instance, "one that somebody has edited")
    assert "2 assets of 1 executions reported" in (result.skip_reason.skip_message or "")
    for step in ("start", "large"):
        [event] = materialised(dagster_instance, step)
        assert event.metadata["execution"].value == str(state.execution_id)
    again = tick(noetl, dagster_instance, result.cursor)
    assert "nothing to report" in (again.skip_reason.skip_message or "")
    assert again.cursor == result.cursor


def materialised(instance: DagsterInstance, step: str) -> list[AssetMaterialization]:
    found = instance.fetch_materializations(AssetKey(["tests", "sample", step]), limit=100).records
    return [one.asset_materialization for one in found if one.asset_materialization is not None]


def test_a_sensor_that_ended_before_it_recorded_its_report_reports_nothing_twice(
    noetl: EngineProvider, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = noetl.engine().runtime.log

    async def killed(*_: Any, **__: Any) -> set[int]:
        raise ConnectionError("killed")

    noetl.run(noetl.engine().run(playbook(CHECKED)))
    with monkeypatch.context() as patched:
        patched.setattr(log, "append", killed)
        with pytest.raises(ConnectionError):
            reporting_tick(noetl, dagster_instance)
    assert len(materialised(dagster_instance, "start")) == 1
    reporting_tick(noetl, dagster_instance)
    assert len(materialised(dagster_instance, "start")) == 1
    key = AssetCheckKey(AssetKey(["tests", "sample", "start"]), "enough")
    [evaluated] = dagster_instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    assert evaluated.status is AssetCheckExecutionRecordStatus.FAILED


def test_sensor_and_ingestor_at_once_take_nothing_twice(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    taken: list[str] = []
    tick(noetl, dagster_instance)  # makes the stream
    publish(noetl, 600)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: ticks_until(600, noetl, dagster_instance, taken), range(3)))
    assert sum(map(events_in, taken)) == 600, taken
    assert run_sync(noetl.engine().runtime.pool.fetchval("SELECT count(*) FROM noetl.event")) == 601


def test_a_tick_without_nats(
    settings: Settings, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.events.transport.nats.CONNECT_SECONDS", 1.0)
    with socket.socket() as unanswered:  # bound, and never listening
        unanswered.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{unanswered.getsockname()[1]}"
        noetl = EngineProvider(settings.model_copy(update={"nats_url": url}))
        run_sync(noetl.engine().run(playbook(TEXT)))
        result = reporting_tick(noetl, dagster_instance)
        close_engines()
    message = result.skip_reason.skip_message or ""
    assert "no events taken: NATS at" in message
    assert "2 assets of 1 executions reported" in message
