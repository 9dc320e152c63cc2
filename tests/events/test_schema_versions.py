"""Versions of the schema: later ones stay, statements wait for tables only so long."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from noetl_dagster.errors import ServiceError, VersionError
from noetl_dagster.events import schema
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.settings import Settings
from tests.waiting import until

from .conftest import connections

TEXTS = {5: "9a7cd25488b72730b76eafec56be6e5cbd3c2d1ff5cfc097475c9e9b35586001"}
"""The texts of each version. Who changes schema/*.sql raises SCHEMA_VERSION and writes the digest here."""

WAITS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query NOT LIKE '%pg_stat_activity%'
"""


def test_another_text_is_another_version() -> None:
    assert TEXTS[schema.SCHEMA_VERSION] == schema.schema_digest(), (
        "schema/*.sql has changed: raise SCHEMA_VERSION in events/schema.py where the last version was released, "
        f"and note {schema.schema_digest()} here"
    )


async def test_a_later_schema_stays(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async with connections(settings, 1) as [connection]:
        await connection.execute("UPDATE noetl.schema_version SET number = 99, digest = 'later'")
        await connection.execute("DROP FUNCTION noetl.close_gate(bigint)")
        applied = await schema.apply_schema_on(connection)
        assert (applied.changed, applied.schema.number) == (False, 99)
        assert await connection.fetchval("SELECT to_regprocedure('noetl.close_gate(bigint)')") is None
    assert "schema 99" in caplog.text


async def test_a_later_schema_that_this_version_does_not_work_with(settings: Settings) -> None:
    async with connections(settings, 1) as [connection]:
        await connection.execute("UPDATE noetl.schema_version SET number = 99, works_from = 98")
        with pytest.raises(ServiceError, match=r"before 98 may not work; .*update this process"):
            await schema.apply_schema_on(connection)


async def test_a_table_that_is_held_is_waited_for_a_little_and_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schema, "LOCK_TIMEOUT", "100ms")
    async with connections(settings, 3) as [holder, applier, onlooker]:
        await onlooker.execute("UPDATE noetl.schema_version SET number = 1")
        holding = holder.transaction()
        await holding.start()
        await holder.execute("LOCK TABLE noetl.queue")
        applying = asyncio.create_task(schema.apply_schema_on(applier))
        await until(lambda: "trying again" in caplog.text, "the first time-out")
        await holding.rollback()
        assert (await applying).changed
        assert f"process {holder.get_server_pid()} (" in caplog.text
        assert "LOCK TABLE noetl.queue" in caplog.text
        assert await onlooker.fetchval(WAITS) == 0


@pytest.mark.usefixtures("months_ahead")
async def test_new_partitions_wait_for_nobody_who_appends(settings: Settings) -> None:
    """Nor do processes that start and find partitions missing."""
    async with connections(settings, 2) as [writer, applier]:
        async with writer.transaction():
            now = snowflake_floor(datetime.now(UTC))
            await writer.execute(
                "INSERT INTO noetl.event (execution_id, event_id, event_type) VALUES ($1, 1, 'x')", now
            )
            applied = await schema.apply_schema_on(applier, lock_seconds=0)
        assert applied.partitions


async def test_two_at_once(settings: Settings) -> None:
    async with connections(settings, 4) as opened:
        await opened[0].execute("DROP SCHEMA noetl CASCADE")
        done = await asyncio.gather(*map(schema.apply_schema_on, opened))
        assert sum(one.changed for one in done) == 1


async def test_who_may_not_apply_waits(settings: Settings, pool: asyncpg.Pool[Any]) -> None:
    assert settings.db_url is not None
    own = settings.model_copy(update={"schema_apply": False})
    await pool.execute("UPDATE noetl.schema_version SET number = 1")
    waiting = asyncio.create_task(schema.ensure_schema(own, pool))
    worker = asyncio.create_task(schema.ensure_schema(own, pool, apply=False))
    await worker  # of a control plane that is not updated yet
    assert not waiting.done()
    await schema.apply_schema(settings.db_url)
    await waiting


async def test_a_start_that_is_refused_leaves_no_connection(settings: Settings) -> None:
    async with connections(settings, 1) as [connection]:
        await connection.execute("UPDATE noetl.schema_version SET number = 99, works_from = 98")
        with pytest.raises(VersionError):
            await schema.open_pool_with_schema(settings, size=2, application="refused")
        left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'refused'"

        async def gone() -> bool:
            return not await connection.fetchval(left)

        await until(gone)
