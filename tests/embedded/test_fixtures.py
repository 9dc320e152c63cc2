"""The shared fixtures give each test servers that work and names that nobody else uses."""

from __future__ import annotations

from typing import Any

import asyncpg
import nats
from dagster import DagsterInstance

from noetl_dagster import embedded
from noetl_dagster.settings import Settings

_COUNT_EVENTS = "SELECT count(*) FROM noetl.event"


async def test_database_has_the_schema_and_is_empty(pool: asyncpg.Pool[Any]) -> None:
    assert await pool.fetchval(_COUNT_EVENTS) == 0
    assert await pool.fetchval("SELECT $1::jsonb", {"deep": [1, None]}) == {"deep": [1, None]}


def test_names_belong_to_the_test(settings: Settings, services: Settings) -> None:
    for name in ("db_url", "minio_bucket", "pvc_mount_path", "nats_namespace"):
        assert getattr(settings, name) != getattr(services, name)


def test_settings_need_no_further_service(settings: Settings) -> None:
    assert embedded.ensure(settings) == settings


async def test_jetstream_answers(settings: Settings) -> None:
    client = await nats.connect(settings.nats_url or "")
    stream = client.jetstream()
    await stream.add_stream(name=settings.nats_namespace, subjects=[f"{settings.nats_namespace}.>"])
    assert (await stream.publish(f"{settings.nats_namespace}.x", b"1")).seq == 1
    await client.close()


def test_dagster_instance_has_storage(dagster_instance: DagsterInstance) -> None:
    assert dagster_instance.get_runs() == []
