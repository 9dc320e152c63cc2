"""Two processes of each kind at once, and two versions at once: no error, and nothing is done twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.abandoned import Verdict
from noetl_dagster.errors import ExecutionStateError
from noetl_dagster.events import schema
from noetl_dagster.events.connection import DATABASE_AWAY
from noetl_dagster.events.projection import Projection
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.service.conftest import Service, serving
from tests.waiting import until, until_projected
from tests.whole import Fan, warm

TABLES = (
    *("event", "execution", "queue", "runtime", "catalog", "dead_letter", "checkpoint", "projection_checkpoint"),
    *("execution_shard", "cursor_frame", "credential", "keychain", "result_ref", "manifest", "manifest_part"),
    *("result_blob", "schedule"),
)
LATER = (
    "".join(f"ALTER TABLE noetl.{name} ADD COLUMN region text DEFAULT 'north';" for name in TABLES)
    + """
CREATE TABLE noetl.region (name text PRIMARY KEY, meta jsonb);
CREATE INDEX event_region ON noetl.event (region) WHERE region IS NOT NULL;
"""
)
"""What a later version may add to the schema."""

UNKNOWN = """
INSERT INTO noetl.event (event_id, execution_id, event_type, node_name, status, meta, region)
SELECT $2::bigint + number, $1, 'step.paused', 'fan', 'PAUSED', '{"visit": 1, "until": {"event": "dawn"}}', 'north'
FROM generate_series(1, 3) AS number
"""
"""Events of a type that this version does not know."""

SHOWN = (
    *("/api/executions/{}", "/api/executions/{}/events", "/api/executions/{}/lifecycle", "/api/executions"),
    *("/executions/{}", "/executions/{}/events", "/executions/{}/events.jsonl", "/executions/{}/steps/fan"),
    *("/executions", "/workers", "/playbooks"),
)


@asynccontextmanager
async def pooled(settings: Settings, workers: int = 2) -> AsyncIterator[tuple[Service, Engine]]:
    """A driver, workers, and an HTTP API with its ingestor."""
    own = settings.model_copy(
        update={"event_transport": EventTransport.NATS, "command_heartbeat_timeout_seconds": 600.0}
    )
    async with serving(own) as service:
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w1", worker_slots=4), working(service.settings, "w2", worker_slots=4):
            await warm(engine)
            yield service, engine
        await engine.close()


async def test_two_of_everything(settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pooled(settings) as (service, first), serving(service.settings):
        second = await Engine.open(service.settings)
        fan = await Fan.start(first, tmp_path, 200, held=2)
        stop = asyncio.Event()

        async def keep_up(engine: Engine) -> None:
            while not stop.is_set():
                await engine.reaper().reap()
                await engine.maintenance().run()
                await Projection(engine.runtime.pool).catch_up()
                found = await engine.recovery().abandoned({})  # for a moment between two drivers, nobody holds it
                assert all(one.verdict is Verdict.WAIT for one in found if one.execution_id == fan.execution_id)
                await asyncio.sleep(0.05)

        upkeep = [asyncio.create_task(keep_up(engine)) for engine in (first, second, second)]
        await fan.until_done(60)
        assert not fan.is_over, "it was to be taken over in the middle"
        other = Fan.driven_elsewhere(second, fan.ledger, fan.execution_id, fan.items)
        driving = asyncio.create_task(second.resume(fan.execution_id))
        with pytest.raises(ExecutionStateError):
            await fan.ended()
        fan.go()
        await driving
        await other.is_whole()
        await until_projected(second.runtime.pool, fan.execution_id, "COMPLETED")
        stop.set()
        await asyncio.gather(*upkeep)
        await second.close()
    assert not errors(caplog)


async def test_a_later_version_is_provisioned_meanwhile(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Drivers, workers, ingestors and pages of this version go on with the schema of a later one."""
    assert settings.db_url is not None
    async with pooled(settings) as (service, engine):
        fan = await Fan.start(engine, tmp_path, 200, held=2)
        await fan.until_done(40)
        with pytest.MonkeyPatch.context() as later:
            texts = [*schema._texts(), LATER]
            later.setattr(schema, "_texts", lambda: texts)
            later.setattr(schema, "SCHEMA_VERSION", schema.SCHEMA_VERSION + 1)
            applied = await schema.apply_schema(settings.db_url)
        assert applied.changed
        assert not fan.is_over, "the schema was to change in the middle"
        fan.go()
        await until_unknown(engine, fan.execution_id)
        new = await Engine.open(service.settings)  # a process that starts now
        async with working(service.settings, "w3", worker_slots=4):
            await fan.is_whole()
            other = await Fan.start(new, tmp_path, 40, name="other")
            await other.is_whole()
        await new.close()
        await until_projected(engine.runtime.pool, fan.execution_id, "COMPLETED")
        for path in SHOWN:
            answer = await service.client.get(path.format(fan.execution_id))
            assert answer.status_code == 200, (path, answer.text)
    assert not errors(caplog)


async def until_unknown(engine: Engine, execution_id: int) -> None:
    """Adds events of an unknown type to an execution."""

    async def added() -> bool:
        try:
            await engine.runtime.pool.execute(UNKNOWN, execution_id, engine.runtime.ids.next())
        except DATABASE_AWAY:
            return False
        return True

    await until(added, "events of an unknown type")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as an error, or with a traceback."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR or record.exc_info is not None
    ]
