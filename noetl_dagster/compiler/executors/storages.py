"""Dagster's storages for processes that drive runs: connections stay open, and tables are looked up once."""

from __future__ import annotations

import time
from contextlib import closing
from functools import cache
from typing import Any
from weakref import WeakSet

from dagster import DagsterInstance, EventLogEntry
from dagster_postgres import DagsterPostgresStorage, PostgresEventLogStorage
from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import QueuePool

from noetl_dagster.dagster_internals import ASSET_CHECK_EVENTS, ASSET_EVENTS, ConfigurableClassData
from noetl_dagster.embedded import driver_url

STATEMENT_MILLISECONDS = 0
"""Statements of a run have no timeout: 0 means that in PostgreSQL."""

RECYCLE_SECONDS = 3_600
CONNECTIONS = 20
"""Connections of one storage besides the one that stays open: more than steps run at the same time."""

IDLE_SECONDS = 1.0
_LAST_USED = "noetl_last_used"

_kept: WeakSet[DagsterInstance] = WeakSet()

_ASKED_OF_RUNS = ("has_run_stats_index_cols", "has_backfill_id_column")
_ASKED_OF_EVENTS = (
    "has_asset_key_index_cols",
    "_has_asset_key_index_cols_on_connection",
    "can_read_asset_status_cache",
    "has_table",
)


_INSERT_EVENT = """
INSERT INTO event_logs (run_id, event, dagster_event_type, timestamp, step_key, asset_key, partition)
VALUES (
    %(run_id)s, %(event)s, %(dagster_event_type)s, %(timestamp)s, %(step_key)s, %(asset_key)s, %(partition)s
) RETURNING id
"""


def keep_connections(instance: DagsterInstance) -> None:
    """Keeps an instance's connections open, and remembers which columns its tables have.

    Dagster's storages open a connection for each event, two fifths of what a small step costs, and read the catalog
    of the database some ten times a run, to see whether it was migrated: a quarter of what a short run costs. One of
    these lookups needs a second connection, which is closed after it. A table or column that exists stays; one that
    is missing is looked up again. A second call for an instance does nothing.
    """
    if instance in _kept:
        return
    _kept.add(instance)
    _test_idle_connections()
    instance.optimize_for_webserver(
        statement_timeout=STATEMENT_MILLISECONDS, pool_recycle=RECYCLE_SECONDS, max_overflow=CONNECTIONS
    )
    for storage, questions in (
        (instance.run_storage, _ASKED_OF_RUNS),
        (instance.event_log_storage, _ASKED_OF_EVENTS),
    ):
        for question in questions:
            _remember(storage, question)
    if isinstance(instance.event_log_storage, PostgresEventLogStorage):
        _store_events_directly(instance.event_log_storage)


@cache
def _test_idle_connections() -> None:
    """Tests connections of SQLAlchemy's pools that were idle before they are used.

    The server may have been restarted, or a firewall may have dropped them.
    """

    def returned(connection: Any, record: Any) -> None:
        record.info[_LAST_USED] = time.monotonic()

    def given_out(connection: Any, record: Any, proxy: Any) -> None:
        if time.monotonic() - record.info.get(_LAST_USED, 0.0) < IDLE_SECONDS:
            return
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute("SELECT 1")
            connection.rollback()
        except Exception as error:
            raise DisconnectionError("the connection was lost while it was idle") from error

    event.listen(QueuePool, "checkin", returned)
    event.listen(QueuePool, "checkout", given_out)


def _remember(storage: Any, question: str) -> None:
    """Caches the answer of a method once it is true. A method that Dagster has removed is skipped."""
    ask = getattr(storage, question, None)
    if not callable(ask):
        return
    known: set[str] = set()  # the tables asked about; "" for a question about one column

    def answer(*given: Any) -> bool:
        about = given[0] if given and isinstance(given[0], str) else ""
        if about not in known and ask(*given):
            known.add(about)
        return about in known

    setattr(storage, question, answer)


def _store_events_directly(storage: Any) -> None:
    """Stores each event with one statement that is written here, which takes half the CPU time.

    Otherwise SQLAlchemy makes and compiles a statement for each event, and Dagster sends a notification in a
    transaction of its own, to which it no longer listens. Other rows of the events of assets and checks are Dagster's.
    """

    def store_event(entry: EventLogEntry) -> None:
        with storage.run_connection(entry.run_id) as connection:
            event_id = connection.exec_driver_sql(_INSERT_EVENT, storage._event_to_row(entry)).scalar_one()
        made = entry.dagster_event
        if made is None:
            return
        if made.event_type in ASSET_CHECK_EVENTS:
            storage.store_asset_check_event(entry, event_id)
        elif made.event_type in ASSET_EVENTS and made.asset_key:
            with storage.index_transaction() as connection:
                storage._store_asset_event_tags(connection, [entry], [event_id])
                storage._store_asset_event(connection, entry, event_id)

    storage.store_event = store_event


class PostgresStorage(DagsterPostgresStorage):
    """``DagsterPostgresStorage``, whose ``postgres_url`` may be a bare ``postgresql://``.

    So that one Secret serves ``dagster.yaml`` and ``NOETL_DAGSTER_DB_URL``. Its configuration is that of its base
    class.
    """

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> Any:
        """Makes the storage that ``dagster.yaml`` configures."""
        given: Any = dict(config_value)
        if given.get("postgres_url") is not None:
            given["postgres_url"] = driver_url(given["postgres_url"])
        return super().from_config_value(inst_data, given)
