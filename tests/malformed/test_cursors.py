"""Cursors of Dagster's sensors and checkpoints of the projection that are malformed, for example edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from dagster import DagsterInstance, SensorDefinition, SensorResult, build_sensor_context

from noetl_dagster.compiler.automation import build_observation_sensor
from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.sensors.nats_events import build_event_sensor
from noetl_dagster.sensors.recovery import build_recovery_sensor
from tests.events.test_projection import ALL, CHECKPOINTS, end, opening, settle
from tests.playbooks import playbook

OBSERVING = """
dagster: {{observe: [{{asset: lake/files, object: "{folder}/*.txt", every: 10s}}]}}
workflow: [{{step: start, tool: {{kind: noop}}}}]
"""

SENSORS: dict[str, Callable[[EngineProvider, Path], SensorDefinition | None]] = {
    "noetl_recovery": lambda noetl, folder: build_recovery_sensor(
        [compile_playbook(playbook(OBSERVING.format(folder=folder)))], noetl
    ),
    "noetl_events": lambda noetl, _: build_event_sensor(noetl),
    "noetl_observe": lambda noetl, folder: build_observation_sensor([playbook(OBSERVING.format(folder=folder))], noetl),
}

ANY_CURSOR = ["x", "null", "1", '"x"', "[]", "[[]]", '{"a": ', "[" * 100_000, "\x00", "é\ufffe"]
CURSORS: dict[str, list[str]] = {
    "noetl_recovery": [
        *('{"x": [1, 1, 1.0]}', '{"1": []}', '{"1": [1, 1]}', '{"1": [1, 1, 1.0, 1]}', '{"1": {"epoch": "x"}}'),
        *('{"1": ["x", 1, 1.0]}', '{"1": [1, -1, 1.0]}', '{"1": [1, 1000000, 1.0]}', '{"1": [1, 1, NaN]}'),
        *('{"1": [1, 1, 1e999]}', '{"1": [1, 1, "x"]}'),
    ],
    "noetl_events": [
        *('{"xact_id": -1}', '{"xact_id": "x"}', f'{{"xact_id": {2**64}}}', f'{{"event_id": {2**63}}}'),
        *('{"event_id": 1.5}', f'{{"event_id": {"9" * 400}}}'),
    ],
    "noetl_observe": [
        *('{"lake/files": null}', '{"lake/files": []}', '{"lake/files": NaN}', '{"lake/files": -1}'),
        *('{"lake/files": 1e999}', '{"a": "x"}'),
    ],
}


@pytest.mark.parametrize("name", SENSORS)
def test_cursors(
    name: str,
    noetl: EngineProvider,
    dagster_instance: DagsterInstance,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sensor = SENSORS[name](noetl, tmp_path)
    assert sensor is not None

    def tick(cursor: str | None) -> tuple[SensorResult, str]:
        context = build_sensor_context(instance=dagster_instance, cursor=cursor, sensor_name=name)
        result: Any = sensor(context)
        return result, capsys.readouterr().err

    expected, _ = tick(None)
    for cursor in [*ANY_CURSOR, *CURSORS[name]]:
        result, said = tick(cursor)
        assert f"of sensor {name} is malformed" in said, cursor[:80]
        assert len(said) < 1_500
        assert len(result.asset_events) == len(expected.asset_events), cursor[:80]
        assert result.cursor is not None
    assert "is malformed" not in tick(result.cursor)[1]


def test_a_source_that_was_observed_in_the_future_is_due(
    noetl: EngineProvider, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    sensor: Any = SENSORS["noetl_observe"](noetl, tmp_path)
    cursor = json.dumps({"lake/files": 1e300})
    result = sensor(build_sensor_context(instance=dagster_instance, cursor=cursor))
    assert len(result.asset_events) == 1


CHANGES = {
    "a checkpoint ahead of the server": f"UPDATE noetl.projection_checkpoint SET xact_id = '{2**64 - 1}' WHERE shard = 1",
    "all checkpoints ahead of the server": "UPDATE noetl.projection_checkpoint SET xact_id = '9000000000000000000'",
    "a checkpoint that is missing": "DELETE FROM noetl.projection_checkpoint WHERE shard = 2",
    "no checkpoints": "DELETE FROM noetl.projection_checkpoint",
    "shards that are none": f"INSERT INTO noetl.projection_checkpoint VALUES (-1, '0'), (4, '0'), ({2**31 - 1}, '{2**64 - 1}')",
    "as many events as a number can hold": f"UPDATE noetl.projection_checkpoint SET events = {2**63 - 1}",
    "a negative number of events": f"UPDATE noetl.projection_checkpoint SET events = {-(2**63)}",
    "a time that is infinite": "UPDATE noetl.projection_checkpoint SET updated_at = 'infinity'",
}
"""Changes of checkpoints after which the projection has to become what it was."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_checkpoints(change: str, pool: asyncpg.Pool[Any]) -> None:
    ids = Snowflake(7)
    log, projection, executions = EventLog(pool, ids), Projection(pool, batch=10), [ids.next() for _ in range(12)]

    def event(execution_id: int, type_: EventType, **fields: Any) -> Event:
        return Event(execution_id, ids.next(), type_, **fields)

    for execution_id in executions:
        await log.append(opening(event, execution_id, 3))
        await log.append([end(event, execution_id, 0)])
    await settle(projection)
    assert len(await pool.fetch(CHECKPOINTS)) == 4
    await pool.execute(change)
    for execution_id in executions:
        await log.append([end(event, execution_id, 1)])
    await settle(projection)
    found = await pool.fetch(ALL)
    assert [row["state"]["loop"]["work"]["done"] for row in found] == [2] * 12
