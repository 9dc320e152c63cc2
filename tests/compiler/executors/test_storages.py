"""Dagster's storage in a process that drives many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetCheckResult, DagsterInstance, asset, asset_check, materialize
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Engine
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


def rows_of(instance: DagsterInstance, run_id: str) -> list[tuple[Any, ...]]:
    """Returns what differs from other runs neither in ids nor in times."""
    storage: Any = instance.event_log_storage
    with storage.index_connection() as connection:
        events = connection.execute(
            text(
                "SELECT dagster_event_type, step_key, asset_key, partition, "
                "event::json ->> 'level', event::json -> 'dagster_event' ->> 'event_type_value' "
                "FROM event_logs WHERE run_id = :run ORDER BY id"
            ),
            {"run": run_id},
        )
        tags = connection.execute(
            text(
                "SELECT t.asset_key, t.key FROM asset_event_tags t JOIN event_logs e ON e.id = t.event_id "
                "WHERE e.run_id = :run ORDER BY t.id"
            ),
            {"run": run_id},
        )
        assets = connection.execute(
            text(
                "SELECT asset_key, last_materialization IS NOT NULL FROM asset_keys WHERE last_run_id = :run ORDER BY id"
            ),
            {"run": run_id},
        )
        checks = connection.execute(
            text("SELECT asset_key, check_name, execution_status FROM asset_check_executions WHERE run_id = :run"),
            {"run": run_id},
        )
        return [tuple(row) for found in (events, tags, assets, checks) for row in found]


@asset_check(asset=doubled)
def is_even(doubled: int) -> AssetCheckResult:
    return AssetCheckResult(passed=doubled % 2 == 0)


def test_events_are_stored_as_dagster_stores_them(instance: DagsterInstance, tmp_path: Path) -> None:
    statements: list[str] = []

    def executed(connection: object, cursor: object, statement: str, *given: object) -> None:
        statements.append(statement)

    definitions = [counted, doubled, is_even]
    with DagsterInstance.from_config(str(tmp_path / "dagster")) as plain:
        expected = rows_of(plain, materialize(definitions, instance=plain).run_id)
    event.listen(Engine, "before_cursor_execute", executed)
    try:
        run = materialize(definitions, instance=instance)
    finally:
        event.remove(Engine, "before_cursor_execute", executed)
    assert rows_of(instance, run.run_id) == expected
    assert not any("NOTIFY" in statement for statement in statements)


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
