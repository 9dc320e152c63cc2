"""Applies ``schema/*.sql`` and keeps the partitions of ``noetl.event`` ahead of time."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import asyncpg

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.ids import snowflake_floor

SCHEMA_LOCK = 7_306_001
"""Key of the advisory lock under which one process at a time changes the schema."""

MONTHS_AHEAD = 3

_APPLIED = "SELECT obj_description('noetl'::regnamespace)"
_MARK = "COMMENT ON SCHEMA noetl IS '{digest}'"
_PARTITIONS = """
SELECT child.relname FROM pg_inherits
JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = 'noetl.event'::regclass
"""
_CREATE_PARTITION = (
    "CREATE TABLE IF NOT EXISTS noetl.{name} PARTITION OF noetl.event FOR VALUES FROM ({start}) TO ({end})"
)


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
    texts = [path.read_text(encoding="utf-8") for path in schema_files()]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
        exists = await connection.fetchval("SELECT to_regnamespace('noetl') IS NOT NULL")
        if not exists or await connection.fetchval(_APPLIED) != digest:
            for text in texts:
                await connection.execute(text)
            await connection.execute(_MARK.format(digest=digest))
        await ensure_partitions(connection, now or datetime.now(UTC))


async def ensure_partitions(connection: asyncpg.Connection, now: datetime) -> list[str]:
    """Makes the monthly partitions from this month to three months ahead; returns the new ones' names."""
    present = {row["relname"] for row in await connection.fetch(_PARTITIONS)}
    made = []
    for start, end in month_bounds(now, MONTHS_AHEAD):
        name = partition_name(start)
        if name in present:
            continue
        statement = _CREATE_PARTITION.format(name=name, start=_floor(start), end=_floor(end))
        await connection.execute(statement)
        made.append(name)
    return made


def month_bounds(now: datetime, ahead: int) -> list[tuple[datetime, datetime]]:
    """The month of ``now`` and the ``ahead`` following ones, as half-open intervals."""
    months = [now.year * 12 + now.month - 1 + step for step in range(ahead + 2)]
    starts = [datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC) for month in months]
    return list(zip(starts, starts[1:], strict=False))


def partition_name(start: datetime) -> str:
    return f"event_y{start.year:04d}m{start.month:02d}"


def _floor(moment: datetime) -> int:
    return snowflake_floor(int(moment.timestamp() * 1000))
