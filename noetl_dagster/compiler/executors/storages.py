"""Dagster's storages for processes that drive runs: connections stay open, and tables are looked up once."""

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

from noetl_dagster.embedded import driver_url

STATEMENT_MILLISECONDS = 0
"""Statements of a run have no timeout: 0 means that in PostgreSQL."""

RECYCLE_SECONDS = 3_600
CONNECTIONS = 20
"""Connections of one storage besides the one that stays open: more than steps run at the same time."""

IDLE_SECONDS = 1.0
_LAST_USED = "noetl_last_used"

_pooled: WeakSet[DagsterInstance] = WeakSet()

_LOOKUPS = ("has_table", "has_asset_key_index_cols", "can_read_asset_status_cache")
"""Public methods of the event storage that read the catalog of the database for each event of an asset."""


def keep_connections(instance: DagsterInstance) -> None:
    """Keeps an instance's connections open.

    Dagster's storages open a connection for each event, two fifths of what a small step costs. A second call for an
    instance does nothing.
    """
    if instance in _pooled:
        return
    _pooled.add(instance)
    _test_idle_connections()
    instance.optimize_for_webserver(
        statement_timeout=STATEMENT_MILLISECONDS, pool_recycle=RECYCLE_SECONDS, max_overflow=CONNECTIONS
    )
    for lookup in _LOOKUPS:
        _remember(instance.event_log_storage, lookup)


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


def _remember(storage: Any, lookup: str) -> None:
    """Remembers the answers of a lookup that are true: what exists stays, and what is missing is looked up again.

    Without this, each result of a step costs a connection and four queries: a chain of small steps takes twice as long.
    """
    look_up = getattr(storage, lookup, None)
    if look_up is None:  # Dagster has removed it
        return
    confirmed: set[tuple[str, ...]] = set()  # by the arguments: a table, or none

    def answer(*arguments: str) -> bool:
        if arguments not in confirmed and look_up(*arguments):
            confirmed.add(arguments)
        return arguments in confirmed

    setattr(storage, lookup, answer)


class PostgresStorage(DagsterPostgresStorage):
    """``DagsterPostgresStorage``, whose ``postgres_url`` may be a bare ``postgresql://``.

    So that one Secret serves ``dagster.yaml`` and ``NOETL_DAGSTER_DB_URL``. Its configuration is that of its base
    class.
    """

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> Any:
        """Makes the storage that ``dagster.yaml`` configures."""
        config: Any = dict(config_value)
        if config.get("postgres_url") is not None:
            config["postgres_url"] = driver_url(config["postgres_url"])
        return super().from_config_value(inst_data, config)
