"""Applies ``schema/*.sql`` and keeps the partitions of ``noetl.event`` ahead of time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from pathlib import Path

import asyncpg

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import snowflake_floor

logger = logging.getLogger(__name__)

SCHEMA_LOCK = 7_306_001
"""Key of the advisory lock under which one process at a time changes the schema."""

MONTHS_AHEAD = 3
_PARTITION_NAME = re.compile(r"event_y(\d{4})m(\d{2})")

_APPLIED = "SELECT obj_description('noetl'::regnamespace)"
_EXISTS = "SELECT to_regnamespace('noetl') IS NOT NULL"
_MARK = "COMMENT ON SCHEMA noetl IS '{digest}'"
_PARTITIONS = """
SELECT child.relname FROM pg_inherits
JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = 'noetl.event'::regclass
"""
_CREATE_PARTITION = (
    "CREATE TABLE IF NOT EXISTS noetl.{name} PARTITION OF noetl.event FOR VALUES FROM ({start}) TO ({end})"
)
_CAUGHT = "SELECT EXISTS (SELECT 1 FROM noetl.event_default WHERE execution_id >= $1 AND execution_id < $2)"
_CREATE_APART = "CREATE TABLE noetl.{name} (LIKE noetl.event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"
_MOVE = """
WITH caught AS (
    DELETE FROM noetl.event_default WHERE execution_id >= $1 AND execution_id < $2 RETURNING *
) INSERT INTO noetl.{name} SELECT * FROM caught
"""
_ATTACH = "ALTER TABLE noetl.event ATTACH PARTITION noetl.{name} FOR VALUES FROM ({start}) TO ({end})"


def schema_folder() -> Path:
    """Folder of the numbered SQL files: beside the package in a checkout, inside it in a wheel."""
    packaged = Path(str(resources.files("noetl_dagster"))) / "schema"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "schema"


def schema_files() -> list[Path]:
    """The SQL files in the order in which they are applied."""
    files = sorted(schema_folder().glob("[0-9]*.sql"))
    if not files:
        raise ServiceError(f"no schema files in {schema_folder()}; reinstall noetl-dagster")
    return files


async def apply_schema(url: str, *, now: datetime | None = None) -> None:
    """Brings a database up to the schema and makes its partitions; does nothing when it is up to date.

    Args:
        url: ``postgresql://`` address of the database.
        now: moment from which partitions are made ahead; default: the clock.
    """
    connection = await asyncpg.connect(url)
    try:
        await apply_schema_on(connection, now=now)
    finally:
        await connection.close()


async def apply_schema_on(connection: asyncpg.Connection, *, now: datetime | None = None) -> None:
    """As :func:`apply_schema`, on an open connection."""
    texts = _texts()
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
        if not await is_current(connection):
            for text in texts:
                await connection.execute(text)
            await connection.execute(_MARK.format(digest=_digest(texts)))
        await ensure_partitions(connection, now or datetime.now(UTC))


async def is_current(connection: asyncpg.Connection) -> bool | None:
    """Whether a database has the schema of this version; None where it has none at all."""
    if not await connection.fetchval(_EXISTS):
        return None
    return bool(await connection.fetchval(_APPLIED) == _digest(_texts()))


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in schema_files()]


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


async def await_schema(pool: asyncpg.Pool, *, patience: float = 300.0) -> None:
    """Waits, for ``patience`` seconds, until somebody else has applied the schema to a new database.

    Raises:
        ServiceError: nobody has.
    """
    deadline = asyncio.get_running_loop().time() + patience
    told = False
    while not await pool.fetchval(_EXISTS):
        if not told:
            logger.warning("the event log has no schema yet; waiting for 'noetl-dagster serve' to apply it")
            told = True
        if asyncio.get_running_loop().time() > deadline:
            raise ServiceError(
                "the event log has no schema; start 'noetl-dagster serve', which applies it, or check that "
                "NOETL_DB_URL names its database"
            )
        await asyncio.sleep(0.25)


async def partitions(connection: asyncpg.Connection) -> list[str]:
    """Names of the partitions of ``noetl.event``, the default one included."""
    return [row["relname"] for row in await connection.fetch(_PARTITIONS)]


async def ensure_partitions(connection: asyncpg.Connection, now: datetime) -> list[str]:
    """Makes the monthly partitions from this month to three months ahead; returns the new ones' names."""
    present = set(await partitions(connection))
    made = []
    for start, end in month_bounds(now, MONTHS_AHEAD):
        name = partition_name(start)
        if name in present:
            continue
        await _make_partition(connection, name, partition_floor(start), partition_floor(end))
        made.append(name)
    return made


async def _make_partition(connection: asyncpg.Connection, name: str, start: int, end: int) -> None:
    """Makes a partition; events of its range that the default partition has caught move into it."""
    if not await connection.fetchval(_CAUGHT, start, end):
        await connection.execute(_CREATE_PARTITION.format(name=name, start=start, end=end))
        return
    async with connection.transaction():
        await connection.execute(_CREATE_APART.format(name=name))
        await connection.execute(_MOVE.format(name=name), start, end)
        await connection.execute(_ATTACH.format(name=name, start=start, end=end))


def month_bounds(now: datetime, ahead: int) -> list[tuple[datetime, datetime]]:
    """The month of ``now`` and the ``ahead`` following ones, as half-open intervals."""
    months = [now.year * 12 + now.month - 1 + step for step in range(ahead + 2)]
    starts = [datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC) for month in months]
    return list(pairwise(starts))


def partition_name(start: datetime) -> str:
    return f"event_y{start.year:04d}m{start.month:02d}"


def partition_start(name: str) -> datetime | None:
    """The month of a partition by its name, None for one that is not monthly."""
    found = _PARTITION_NAME.fullmatch(name)
    return datetime(int(found[1]), int(found[2]), 1, tzinfo=UTC) if found is not None else None


def partition_floor(moment: datetime) -> int:
    """The smallest execution id of a moment."""
    return snowflake_floor(int(moment.timestamp() * 1000))
