"""Dagster's storage in a process that drives many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, asset, materialize
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import Pool

from noetl_dagster import embedded
from noetl_dagster.compiler.executors.storages import keep_connections
from noetl_dagster.embedded import driver_url
from noetl_dagster.settings import Settings


@pytest.fixture
def instance(services: Settings, tmp_path: Path) -> Iterator[DagsterInstance]:
    home = embedded.dagster_home(services.model_copy(update={"home": tmp_path}))
    with DagsterInstance.from_config(str(home)) as opened:
        keep_connections(opened)
        yield opened


@asset
def counted() -> int:
    return 1


@asset
def doubled(counted: int) -> int:
    return 2 * counted


def test_the_connections_of_a_run_stay_open(instance: DagsterInstance) -> None:
    opened = []

    def connected(*given: object) -> None:
        opened.append(given)

    materialize([counted, doubled], instance=instance)
    event.listen(Pool, "connect", connected)
    try:
        assert materialize([counted, doubled], instance=instance).success
    finally:
        event.remove(Pool, "connect", connected)
    assert opened == []


def test_a_missing_table_is_looked_up_again(instance: DagsterInstance) -> None:
    storage: Any = instance.event_log_storage
    assert storage.has_table("event_logs")
    assert not storage.has_table("asset_made_later")
    with storage.index_connection() as connection:
        connection.execute(text("CREATE TABLE asset_made_later (id int)"))
    try:
        assert storage.has_table("asset_made_later")
    finally:
        with storage.index_connection() as connection:
            connection.execute(text("DROP TABLE asset_made_later"))


def test_an_event_after_a_lost_connection_is_stored(instance: DagsterInstance, services: Settings) -> None:
    storage: Any = instance.event_log_storage
    run = materialize([counted], instance=instance)
    entry = instance.all_logs(run.run_id)[-1]
    with storage.index_connection() as connection:
        kept = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    other = create_engine(driver_url(str(services.dagster_db_url)))
    with other.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": kept})
    other.dispose()
    with pytest.raises(DatabaseError):
        storage.store_event(entry)
    storage.store_event(entry)
    assert instance.all_logs(run.run_id)[-2:] == [entry, entry]
