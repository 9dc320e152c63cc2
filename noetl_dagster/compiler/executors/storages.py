"""Dagster's storages for processes that drive runs: connections stay open, and table columns are looked up once."""

from __future__ import annotations

import time
from contextlib import closing
from functools import cache
from typing import Any
from weakref import WeakSet

from dagster import DagsterInstance
from dagster_postgres import DagsterPostgresStorage
from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import QueuePool

from noetl_dagster.dagster_internals import ConfigurableClassData
from noetl_dagster.embedded.dagster_home import driver_url

STATEMENT_MILLISECONDS = 0
"""No statement of a run is given up: 0 is PostgreSQL's own word for that."""

RECYCLE_SECONDS = 3_600
CONNECTIONS = 20
"""Of one storage beside the one that stays open: more than steps run at the same time."""

IDLE_SECONDS = 1.0
_LAST_USED = "noetl_last_used"

_settled: WeakSet[DagsterInstance] = WeakSet()

_ASKED_OF_RUNS = ("has_run_stats_index_cols", "has_backfill_id_column")
_ASKED_OF_EVENTS = ("has_asset_key_index_cols", "_has_asset_key_index_cols_on_connection")


def settle(instance: DagsterInstance) -> None:
    """Has an instance keep its connections, and remember which columns its tables have.

    Dagster's storages open a connection for each event, two fifths of what a small step costs, and read the catalog
    of the database some ten times a run, to see whether it was migrated: a quarter of what a short run costs. A
    column that is there stays there; one that is not is looked for again. Settling an instance again does nothing.
    """
    if instance in _settled:
        return
    _settled.add(instance)
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


@cache
def _test_idle_connections() -> None:
    """Connections of SQLAlchemy's pools that nobody used for a moment are tried before they are given out: the
    server may have been restarted, or a firewall have dropped them."""

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
            raise DisconnectionError("the connection was lost while nobody used it") from error

    event.listen(QueuePool, "checkin", returned)
    event.listen(QueuePool, "checkout", given_out)


def _remember(storage: Any, question: str) -> None:
    """Answers a question at once from the time when its answer was yes. One that is gone is not asked any more."""
    ask = getattr(storage, question, None)
    if not callable(ask):
        return
    known = False

    def answer(*connection: Any) -> bool:
        nonlocal known
        known = known or bool(ask(*connection))
        return known

    setattr(storage, question, answer)


class PostgresStorage(DagsterPostgresStorage):
    """``DagsterPostgresStorage``, whose ``postgres_url`` may be a bare ``postgresql://``.

    So that one Secret serves ``dagster.yaml`` and ``NOETL_DAGSTER_DB_URL``. Its configuration is that of the class
    it stands on.
    """

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> Any:
        given: Any = dict(config_value)
        if given.get("postgres_url") is not None:
            given["postgres_url"] = driver_url(given["postgres_url"])
        return super().from_config_value(inst_data, given)
