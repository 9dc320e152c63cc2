"""The reaper, the maintenance and the projection do real work, and only when there is some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dagster import DagsterInstance, RunRequest, SkipReason, build_schedule_context, build_sensor_context

from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.sensors.maintenance import build_maintenance
from noetl_dagster.sensors.projection import build_projection_sensor
from noetl_dagster.sensors.reaper import build_reaper
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.context import own_context

PUT_LEASE = """
INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, attempts,
                         lease_until, worker_id, context)
VALUES (1, 'c', 1, 's', 'noop', 'leased', 1, now() - interval '1 s', 'w', $1)
"""


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    yield EngineProvider(settings)
    close_engines()


def test_the_reaper_runs_only_when_a_claim_has_expired(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    reaper, schedule = build_reaper(noetl)
    evaluate: Any = schedule
    context = build_schedule_context(instance=dagster_instance)
    assert isinstance(evaluate(context), SkipReason)
    pool = noetl.engine().runtime.pool
    run_sync(pool.execute(PUT_LEASE, own_context(Command(1, "s")) | {"step": "s"}))
    assert isinstance(evaluate(context), RunRequest)
    assert reaper.execute_in_process(instance=dagster_instance).success
    assert run_sync(pool.fetchval("SELECT status FROM noetl.queue")) == "queued"
    assert isinstance(evaluate(context), SkipReason)


def test_maintenance_and_projection_run(noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    maintenance, _ = build_maintenance(noetl)
    assert maintenance.execute_in_process(instance=dagster_instance).success
    tick: Any = build_projection_sensor(noetl)
    reason = tick(build_sensor_context(instance=dagster_instance))
    assert "behind" in reason.skip_message
