"""Dagster's storage in PostgreSQL, at an address as the settings have it."""

from __future__ import annotations

from typing import Any

from dagster_postgres import DagsterPostgresStorage

from noetl_dagster.dagster_internals import ConfigurableClassData
from noetl_dagster.embedded.dagster_home import driver_url


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
