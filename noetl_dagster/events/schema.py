"""Applies ``schema/*.sql`` and creates the partitions of ``noetl.event`` ahead of time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import asyncpg

from noetl_dagster.errors import ServiceError, VersionError
from noetl_dagster.events.commit_order import adopt, is_of_another_server
from noetl_dagster.events.connection import connect, open_pool
from noetl_dagster.events.ids import snowflake_floor, snowflake_milliseconds
from noetl_dagster.extras import shipped_folder
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)

SCHEMA_LOCK = 7_306_001
"""Key of the advisory lock under which one process at a time changes the schema."""

PARTITIONS_AHEAD = 3
_BOUNDS = re.compile(r"FROM \('(\d+)'\) TO \('(\d+)'\)")

SCHEMA_VERSION = 5
"""Increased with every version whose ``schema/*.sql`` differs; a test compares the texts with it."""

WORKS_FROM = 4
"""The oldest version whose processes may use this schema; increased when something that they use is removed."""

LOCK_TIMEOUT = "500ms"
"""How long a statement waits for a locked table. Everybody else who wants the table waits behind it. It is shorter than
``deadlock_timeout`` of PostgreSQL (1 s), so that in a deadlock the change gives way, and not the work of others."""

LOCK_SECONDS = 120.0
"""How long a change is tried again while tables are locked."""

HOLDERS_LENGTH = 80

_HOLDERS = f"""
SELECT a.pid, a.application_name, a.state, extract(epoch FROM now() - a.xact_start)::int AS seconds,
    left(regexp_replace(a.query, '\\s+', ' ', 'g'), {HOLDERS_LENGTH}) AS query
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
    AND EXISTS (SELECT 1 FROM pg_locks l WHERE l.pid = a.pid AND l.granted AND l.locktype IN ('relation', 'advisory'))
ORDER BY a.xact_start LIMIT 3
"""

# pg_tables, because to_regclass may answer from before the wait for a lock.
_EXISTS = "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = 'noetl' AND tablename = 'schema_version')"
_NUMBERED = "SELECT number, works_from, digest FROM noetl.schema_version"
_NUMBER = """
INSERT INTO noetl.schema_version (number, digest, works_from) VALUES ($1, $2, $3)
ON CONFLICT (one) DO UPDATE SET number = EXCLUDED.number, digest = EXCLUDED.digest,
    works_from = EXCLUDED.works_from, applied_at = now()
"""
_PARTITIONS = """
SELECT child.relname, pg_get_expr(child.relpartbound, child.oid) AS bounds FROM pg_inherits
JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = 'noetl.event'::regclass
"""
_LOCK_DEFAULT = "LOCK TABLE noetl.event_default IN ACCESS EXCLUSIVE MODE"
_CREATE_APART = "CREATE TABLE noetl.{name} (LIKE noetl.event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"
_MOVE = """
WITH caught AS (
    DELETE FROM noetl.event_default WHERE execution_id >= $1 AND execution_id < $2 RETURNING *
) INSERT INTO noetl.{name} SELECT * FROM caught
"""
_ATTACH = "ALTER TABLE noetl.event ATTACH PARTITION noetl.{name} FOR VALUES FROM ({start}) TO ({end})"


@dataclass(frozen=True, slots=True)
class FoundSchema:
    """A schema in a database."""

    number: int
    digest: str
    works_from: int

    @property
    def serves(self) -> bool:
        """True if nothing is to be applied: it is the schema of this version, or of a later one."""
        if self.number != SCHEMA_VERSION:
            return self.number > SCHEMA_VERSION
        return self.digest == schema_digest()


@dataclass(frozen=True, slots=True)
class AppliedSchema:
    """The result of applying the schema. ``partitions``: names of the new ones."""

    schema: FoundSchema
    changed: bool
    partitions: tuple[str, ...] = ()


def schema_files() -> list[Path]:
    """Returns the SQL files in the order in which they are applied."""
    folder = shipped_folder("schema")
    files = sorted(folder.glob("[0-9]*.sql"))
    if not files:
        raise ServiceError(f"no schema files in {folder}; reinstall noetl-dagster")
    return files


class HeldError(ServiceError):
    """Tables are locked by other transactions, which the message names."""


async def holders(connection: asyncpg.Connection) -> str:
    """Describes the oldest transactions of a database that hold locks."""
    rows = await connection.fetch(_HOLDERS)
    oldest = [
        f"process {one['pid']} ({one['application_name'] or 'without a name'}, {one['state']}, "
        f"{one['seconds']} s): {one['query']}"
        for one in rows
    ]
    return f"the oldest transactions are {'; '.join(oldest)}" if oldest else "no transaction holds locks any more"


async def apply_schema(
    url: str, lock_seconds: float = LOCK_SECONDS, *, width: timedelta | None = None
) -> AppliedSchema:
    """Applies the schema to a database and creates its partitions; does nothing if it is up to date.

    A schema of a later version stays as it is. No statement waits longer than :data:`LOCK_TIMEOUT` for a locked table,
    since other work would wait behind it; then the whole is tried again.

    Args:
        lock_seconds: how long it is tried again.
        width: of a partition; None: a month.

    Raises:
        ServiceError: the schema is of a later version that excludes this one; or tables stay locked.
    """
    connection = await connect(url)
    try:
        return await apply_schema_on(connection, lock_seconds, width=width)
    finally:
        await connection.close()


async def apply_schema_on(
    connection: asyncpg.Connection, lock_seconds: float = LOCK_SECONDS, *, width: timedelta | None = None
) -> AppliedSchema:
    """Applies the schema like :func:`apply_schema`, on an open connection."""
    now = datetime.now(UTC)
    schema = await found_schema(connection)
    is_complete = schema is not None and schema.serves and not _missing(await partitions(connection), now, width)
    if schema is not None and is_complete and not await is_of_another_server(connection):
        return _warn_if_later(AppliedSchema(schema, changed=False))  # no lock, because processes start often

    async def apply() -> AppliedSchema:
        schema = await found_schema(connection)
        changed = schema is None or not schema.serves
        if changed:
            for text in _texts():
                await connection.execute(text)
            await connection.execute(_NUMBER, SCHEMA_VERSION, schema_digest(), WORKS_FROM)
        await adopt(connection)
        made = await ensure_partitions(connection, now, width)
        applied = await found_schema(connection)
        assert applied is not None
        return _warn_if_later(AppliedSchema(applied, changed, tuple(made)))

    try:
        return await change_schema(connection, apply, lock_seconds)
    except HeldError as error:
        raise HeldError(
            f"the schema of the event log was not changed: {error}; let them end, then run 'noetl-dagster provision'"
        ) from error


async def make_partitions(connection: asyncpg.Connection, now: datetime, width: timedelta | None = None) -> list[str]:
    """Creates partitions like :func:`ensure_partitions`, one process at a time, without blocking others for long."""
    return await change_schema(connection, lambda: ensure_partitions(connection, now, width))


async def change_schema(
    connection: asyncpg.Connection, change: Callable[[], Awaitable[T]], lock_seconds: float = LOCK_SECONDS
) -> T:
    """Runs a change of the schema in a transaction, one process at a time, and again while tables are locked.

    Args:
        lock_seconds: how long it is tried again.

    Raises:
        HeldError: tables stay locked.
    """

    async def attempt() -> T:
        try:
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
                await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                return await change()
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            raise HeldError(f"{error}; {await holders(connection)}") from error

    def note(error: BaseException, pause: float) -> None:
        logger.warning("the schema waits for a table: %s; trying again in %.2g s", error, pause)

    return await with_retries(attempt, RetryLimits((HeldError,), seconds=lock_seconds), on_failure=note)


def _warn_if_later(applied: AppliedSchema) -> AppliedSchema:
    if applied.schema.number > SCHEMA_VERSION:
        logger.warning(
            "the event log has schema %d, this version's is %d; it stays as it is, and this process works on",
            applied.schema.number,
            SCHEMA_VERSION,
        )
    return applied


async def found_schema(connection: asyncpg.Connection | asyncpg.Pool) -> FoundSchema | None:
    """Returns the schema of a database, or None; raises ``VersionError`` if it is a later one that excludes this."""
    if not await connection.fetchval(_EXISTS):
        return None
    schema = FoundSchema(**await connection.fetchrow(_NUMBERED))
    if schema.works_from > SCHEMA_VERSION:
        raise VersionError(
            f"the event log has schema {schema.number}, with which versions whose schema is before "
            f"{schema.works_from} may not work; this one's is {SCHEMA_VERSION}: update this process"
        )
    return schema


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in schema_files()]


def schema_digest() -> str:
    """Returns the digest of the texts of this version's schema."""
    return hashlib.sha256("\n".join(_texts()).encode()).hexdigest()


async def ensure_schema(settings: Settings, pool: asyncpg.Pool, *, apply: bool = True) -> None:
    """Applies the schema to a new database, or waits until a process that may has applied it.

    Args:
        apply: the process belongs to the control plane; a worker may use the schema of an earlier version.

    Raises:
        ServiceError: the wait was in vain; or the schema is of a later version that excludes this one.
    """
    if apply and settings.schema_apply:
        async with pool.acquire() as connection:
            await apply_schema_on(connection, width=settings.partition_width)
        return
    number = SCHEMA_VERSION if apply else 1
    # with a probe the process is not ready meanwhile
    patience = 300.0 if settings.health_port is None else math.inf
    began = time.monotonic()
    warned = False
    while (schema := await found_schema(pool)) is None or schema.number < number:
        if not warned:
            what = "no schema yet" if schema is None else f"schema {schema.number}, {number} is needed"
            logger.warning("the event log has %s; waiting for 'noetl-dagster provision' or 'serve'", what)
            warned = True
        if time.monotonic() > began + patience:
            raise ServiceError(
                "the event log has no schema; run 'noetl-dagster provision' or start 'noetl-dagster serve', which "
                "apply it, or check that NOETL_DB_URL names its database"
            )
        await asyncio.sleep(0.25)


async def open_pool_with_schema(
    settings: Settings, *, size: int, application: str = "noetl", apply: bool = True
) -> asyncpg.Pool:
    """Opens the pool of a process once the schema is applied; leaves no connection behind if it fails."""
    assert settings.db_url is not None
    pool = await open_pool(settings.db_url, size=size, application=application)
    try:
        await ensure_schema(settings, pool, apply=apply)
    except BaseException:
        pool.terminate()
        raise
    return pool


async def partitions(connection: asyncpg.Connection) -> dict[str, range | None]:
    """Returns the partitions of ``noetl.event``: the execution ids of each by its name, None for the default one."""
    bounds_by_name = {}
    for row in await connection.fetch(_PARTITIONS):
        bounds = _BOUNDS.search(row["bounds"])
        bounds_by_name[row["relname"]] = range(*map(int, bounds.groups())) if bounds is not None else None
    return bounds_by_name


async def ensure_partitions(connection: asyncpg.Connection, now: datetime, width: timedelta | None = None) -> list[str]:
    """Creates the partition of ``now`` and the three following ones; returns the names of the new ones.

    Events of their ranges in the default partition move into them. A table that is attached, unlike one that is
    created as a partition, does not keep others from appending events.

    Args:
        width: of a partition; None: a month. Partitions of another width stay, and new ones begin after them.
    """
    made = []
    for name, ids in _missing(await partitions(connection), now, width).items():
        made.append(name)
        bounds = {"start": ids.start, "end": ids.stop}
        async with connection.transaction():
            await connection.execute(_LOCK_DEFAULT)
            await connection.execute(_CREATE_APART.format(name=name))
            await connection.execute(_MOVE.format(name=name), ids.start, ids.stop)
            await connection.execute(_ATTACH.format(name=name, **bounds))
    return made


def _missing(present: dict[str, range | None], now: datetime, width: timedelta | None) -> dict[str, range]:
    """Returns the partitions to create, by name: the coming periods without what present partitions cover."""
    covered = sorted(filter(None, present.values()), key=lambda ids: ids.start)
    missing = {}
    for period in periods(now, width, PARTITIONS_AHEAD):
        first, end = map(snowflake_floor, period)
        for ids in covered:
            if ids.start <= first < ids.stop:
                first = ids.stop
            elif first < ids.start < end:
                end = ids.start
        if first < end:
            missing[_partition_name(first, width)] = range(first, end)
    return missing


def periods(now: datetime, width: timedelta | None, ahead: int) -> list[tuple[datetime, datetime]]:
    """Returns the period of ``now`` and the ``ahead`` following ones, as half-open intervals; without width, months."""
    if width is None:
        months = [now.year * 12 + now.month - 1 + step for step in range(ahead + 2)]
        starts = [datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC) for month in months]
    else:
        origin = datetime.fromtimestamp(0, UTC)
        first = origin + (now - origin) // width * width
        starts = [first + step * width for step in range(ahead + 2)]
    return list(pairwise(starts))


def _partition_name(first: int, width: timedelta | None) -> str:
    """Returns the name of the partition that begins with an execution id."""
    start = datetime.fromtimestamp(snowflake_milliseconds(first) / 1000, UTC)
    text = f"event_y{start.year:04d}m{start.month:02d}"
    if width is not None or start != datetime(start.year, start.month, 1, tzinfo=UTC):
        text += f"d{start.day:02d}t{start:%H%M%S}"
    return text
