"""Dagster's storage in a process that drives many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, asset, materialize
from sqlalchemy import event, text
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool

from noetl_dagster import embedded
from noetl_dagster.compiler.executors.storages import keep_connections
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


def test_a_later_run_neither_connects_nor_reads_the_catalog(instance: DagsterInstance) -> None:
    opened, asked = [], []

    def connected(*given: object) -> None:
        opened.append(given)

    def executed(connection: object, cursor: object, statement: str, *given: object) -> None:
        if "pg_catalog" in statement:
            asked.append(statement)

    materialize([counted, doubled], instance=instance)
    event.listen(Pool, "connect", connected)
    event.listen(Engine, "before_cursor_execute", executed)
    try:
        assert materialize([counted, doubled], instance=instance).success
    finally:
        event.remove(Pool, "connect", connected)
        event.remove(Engine, "before_cursor_execute", executed)
    assert (opened, asked) == ([], [])


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
