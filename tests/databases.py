"""Databases for tests: copies of a template, emptied and renamed after each use instead of made anew.

Copying the template costs PostgreSQL ten times what emptying a copy does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg2

from noetl_dagster.embedded import ServiceName
from noetl_dagster.embedded.isolation import database_url, unique_name
from noetl_dagster.embedded.postgres import ROLE, Postgres
from noetl_dagster.embedded.supervisor import read_state, service
from noetl_dagster.settings import Settings

_CATALOGS = (
    *("type", "attribute", "attrdef", "constraint", "index", "inherits", "trigger", "proc"),
    *("rewrite", "sequence", "description", "policy", "extension", "event_trigger", "publication"),
    *("default_acl", "statistic_ext", "largeobject_metadata", "foreign_server", "cast", "operator"),
)
"""PostgreSQL's own tables whose rows no TRUNCATE touches."""

_RELATIONS = """
SELECT md5(string_agg(format('%s %s %s %s %s %s %s %s', oid, relname, relnamespace, relowner, relkind,
                             relacl, reloptions, relpartbound), ',' ORDER BY oid)) FROM pg_class
WHERE relpersistence <> 't' AND relnamespace <> 'pg_toast'::regnamespace
"""
_DEFINITIONS = (
    " UNION ALL ".join(
        f"SELECT '{name}', count(*)::text, coalesce(max(xmin::text::bigint), 0)::text FROM pg_{name}"
        for name in _CATALOGS
    )
    + " UNION ALL SELECT 'namespace', count(*)::text, max(xmin::text::bigint)::text FROM pg_namespace"
    + " WHERE nspname !~ '^pg_(toast_)?temp_'"
    + " UNION ALL SELECT 'own settings', count(*)::text, '' FROM pg_db_role_setting"
    + " WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())"
    + f" UNION ALL SELECT 'relations', ({_RELATIONS}), ''"
)
_FILLED = """
SELECT oid::regclass::text, pg_relation_size(oid) FROM pg_class
WHERE relkind = 'r' AND relpersistence <> 't' AND pg_relation_size(oid) > 0
  AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
ORDER BY 1
"""
_SMALL = 256 * 1024
"""Bytes of tables whose rows are deleted: to truncate them, PostgreSQL makes new files for them and their indexes."""
_COUNTED = """
SELECT format('%I.%I', schemaname, sequencename), last_value, start_value FROM pg_sequences
"""
_ADDED = """
SELECT format('DROP SCHEMA IF EXISTS %%I CASCADE', nspname) FROM pg_namespace
WHERE nspname <> ALL(%(schemas)s) AND nspname !~ '^pg_(toast_)?temp_'
UNION ALL
SELECT format('DROP %%s IF EXISTS %%s CASCADE',
              CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' ELSE 'TABLE' END, oid::regclass)
FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'm') AND oid > %(newest)s AND relpersistence <> 't'
"""
_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
PATIENCE_SECONDS = 10.0


def superuser_url(services: Settings) -> str:
    """The address of the server's own database for its superuser, whom only the supervisor and tests use."""
    state = read_state(services.home)
    postgres = service(ServiceName.POSTGRES, services, state)
    assert isinstance(postgres, Postgres)
    return postgres.superuser_url(state.services[ServiceName.POSTGRES].ports)


class Databases:
    """Copies of one template, each with one user at a time and under a new name each time.

    Args:
        services: settings with the addresses of running servers.
        administrator: a superuser's cursor on the server's own database, see ``administering``.
        template: name of the database to copy, to which nothing is connected: it could not be copied then.
    """

    def __init__(self, services: Settings, administrator: Any, template: str) -> None:
        self._services = services
        self.administrator = administrator
        self.template = template
        self.created = 0
        self._empty: list[str] = []
        self._original: _Original | None = None

    @contextmanager
    def one(self) -> Iterator[str]:
        """Yields the name of a database that looks like the template, and that no process of the test reaches afterwards."""
        name = self._empty.pop() if self._empty else self._new()
        before = self._sessions(name)
        try:
            yield name
        finally:
            self._take_back(name, before)

    def close(self) -> None:
        """Drops the databases that wait for a next use."""
        for name in self._empty:
            self._drop(name)
        self._empty.clear()

    def _new(self) -> str:
        name = unique_name()
        self.created += 1
        self.administrator.execute(
            f'CREATE DATABASE "{name}" OWNER {ROLE} TEMPLATE "{self.template}" STRATEGY FILE_COPY'
        )
        if self._original is None:
            with closing(self._connected(name)) as connection:
                self._original = _Original(connection.cursor())
        return name

    def _take_back(self, name: str, before: int) -> None:
        """Restores the database unless it has had no more sessions than ``before``."""
        assert self._original is not None
        renamed = unique_name()
        try:
            # Spark's Python workers connect again at once, and renaming would wait five seconds for them
            self.administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            is_unused = not self._disconnect_others(name) and self._sessions(name) == before
            self.administrator.execute(f'ALTER DATABASE "{name}" RENAME TO "{renamed}"')
            self.administrator.execute(f'ALTER DATABASE "{renamed}" ALLOW_CONNECTIONS true')
        except psycopg2.Error:  # the test dropped it, or a process of the test still connects to it
            self._drop(name)
            return
        if is_unused or self._restored(renamed):
            self._empty.append(renamed)
        else:
            self._drop(renamed)

    def _restored(self, name: str) -> bool:
        assert self._original is not None
        with closing(self._connected(name)) as connection:
            return self._original.restored(connection.cursor())

    def _sessions(self, name: str) -> int:
        """Returns how many sessions have begun; one is counted before it leaves ``pg_stat_activity``."""
        self.administrator.execute("SELECT sessions FROM pg_stat_database WHERE datname = %s", [name])
        [(count,)] = self.administrator.fetchall()
        return int(count)

    def _disconnect_others(self, name: str) -> bool:
        """Ends the sessions of a database; returns whether there were any."""
        # renaming would itself wait for them, but in steps of 100 ms
        deadline = time.monotonic() + PATIENCE_SECONDS
        self.administrator.execute(_OTHERS, [name])
        found = bool(self.administrator.rowcount)
        while self.administrator.rowcount and time.monotonic() < deadline:
            time.sleep(0.002)
            self.administrator.execute(_OTHERS, [name])
        return found

    def _drop(self, name: str) -> None:
        self.administrator.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _connected(self, name: str) -> Any:
        connection = psycopg2.connect(database_url(self._services, name))
        connection.autocommit = True
        return connection


class _Original:
    """Definitions and rows of the template, and how a copy gets back to them."""

    def __init__(self, cursor: Any) -> None:
        self._definitions = _rows(cursor, _DEFINITIONS)
        self._filled = {name: _contents(cursor, name) for name, _size in _rows(cursor, _FILLED)}
        self._counted = _rows(cursor, _COUNTED)
        self._known = {
            "schemas": [name for (name,) in _rows(cursor, "SELECT nspname FROM pg_namespace")],
            "newest": _rows(cursor, "SELECT max(oid)::bigint FROM pg_class")[0][0],
        }

    def restored(self, cursor: Any) -> bool:
        """Deletes the rows and tables that a copy has gained.

        Returns:
            False where the copy still differs from the template, and so cannot be used again.
        """
        for (statement,) in _rows(cursor, _ADDED, self._known):
            cursor.execute(statement)
        gained = {name: size for name, size in _rows(cursor, _FILLED) if name not in self._filled}
        if sum(gained.values()) > _SMALL:
            cursor.execute(f"TRUNCATE {', '.join(gained)} CASCADE")
        elif gained:
            deletions = "; ".join(f"DELETE FROM {name}" for name in gained)
            cursor.execute(f"SET session_replication_role = replica; {deletions}")  # in any order of foreign keys
        for name, _value, start in set(_rows(cursor, _COUNTED)) - set(self._counted):
            cursor.execute("SELECT setval(%s, %s, false)", [name, start])
        return (
            sorted(_rows(cursor, _DEFINITIONS)) == sorted(self._definitions)
            and all(_contents(cursor, name) == contents for name, contents in self._filled.items())
            and sorted(_rows(cursor, _COUNTED), key=str) == sorted(self._counted, key=str)
        )


def _rows(cursor: Any, query: str, values: Any = None) -> list[tuple[Any, ...]]:
    cursor.execute(query, values)
    return list(cursor.fetchall())


def _contents(cursor: Any, table: str) -> list[tuple[Any, ...]]:
    return sorted(_rows(cursor, f"SELECT t::text FROM {table} t"))
