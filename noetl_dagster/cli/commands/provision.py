"""``provision``: creates what a deployment needs before its processes start."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, TypeVar

import asyncpg
import nats.errors
import nats.js.errors
import typer
import yaml

from noetl_dagster import embedded
from noetl_dagster.cli.console import announce_start, fail
from noetl_dagster.cli.doctor import DAGSTER_REMEDY, place_of
from noetl_dagster.errors import NoetlError, ServiceError, StorageError
from noetl_dagster.events.connection import NOT_YET
from noetl_dagster.events.connection import connect as connect_to_database
from noetl_dagster.events.schema import LOCK_SECONDS, LOCK_TIMEOUT, HeldError, apply_schema, holders
from noetl_dagster.events.transport.nats import check_stream, connect, ensure_ingest_consumer, ensure_stream
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import Settings, StoreTier, get_settings
from noetl_dagster.storage.tiers import configured, open_tier
from noetl_dagster.storage.tiers.base import TierUnavailableError

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOCK = 7_306_002
"""Key of the advisory lock under which one process at a time changes Dagster's storage."""

LOCK_NOT_AVAILABLE = "55P03"
CONNECT_SECONDS = 2.0

FAILURES = (NoetlError, asyncpg.PostgresError, asyncpg.InterfaceError, nats.errors.Error, OSError)


class ProvisionState(StrEnum):
    """The result of providing one thing."""

    MADE = "made"
    THERE = "there"
    CHANGED = "changed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Provided:
    """A thing that a deployment needs; ``more`` describes it, or contains the reason of a refusal and its remedy."""

    thing: str
    state: ProvisionState
    more: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.thing}" + (f": {self.more}" if self.more else "")


async def provision(
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for services")] = 60.0,
    lock_wait: Annotated[float, typer.Option(min=0, help="seconds to wait for locked tables")] = LOCK_SECONDS,
) -> None:
    """Create what a deployment needs: schema, streams, buckets, storage.

    The command can be repeated safely.
    """
    settings = embedded.ensure(get_settings(), announce=announce_start)
    limits, well = _Limits(time.monotonic() + wait, lock_wait), True
    for thing, remedy, work in (
        ("event log", "check NOETL_DB_URL, and that its user may create in the database", _event_log),
        ("NATS", "check that JetStream is on", _nats),
        ("stores", "check the settings of the tier, and that the bucket exists", _stores),
        ("Dagster's storage", DAGSTER_REMEDY, _dagster),
    ):
        try:
            async for one in work(settings, limits):
                typer.echo(str(one))
                well = well and one.state is not ProvisionState.REFUSED
        except FAILURES as error:
            more = _text_of(error) if isinstance(error, NoetlError) else f"{_text_of(error)}; {remedy}"
            typer.echo(str(Provided(thing, ProvisionState.REFUSED, more)))
            well = False
    if not well:
        fail("a part was refused, see above; then run 'noetl-dagster provision' again")


@dataclass(frozen=True, slots=True)
class _Limits:
    """How long provisioning waits.

    Attributes:
        deadline: for services, monotonic.
        lock_seconds: for locked tables of one database.
    """

    deadline: float
    lock_seconds: float


async def _event_log(settings: Settings, limits: _Limits) -> AsyncIterator[Provided]:
    if settings.db_url is None:
        raise ServiceError("no database is set; set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    async with _locked(settings.db_url, limits) as connection:
        existed = await connection.fetchval("SELECT to_regnamespace('noetl') IS NOT NULL")
    applied = await apply_schema(settings.db_url, limits.lock_seconds, width=settings.partition_width)
    state = ProvisionState.CHANGED if existed and applied.changed else _made(applied.changed)
    yield Provided("schema noetl", state, f"version {applied.schema.number}")
    for name in applied.partitions:
        yield Provided(f"partition noetl.{name}", ProvisionState.MADE)
    if not applied.partitions:
        yield Provided("partitions of noetl.event", ProvisionState.THERE, "three ahead")


async def _nats(settings: Settings, limits: _Limits) -> AsyncIterator[Provided]:
    deadline = limits.deadline
    client = await _until(deadline, lambda: connect(settings, "provision", seconds=CONNECT_SECONDS), ServiceError)
    names = client.names
    try:
        stream = client.jetstream(timeout=max(CONNECT_SECONDS, deadline - time.monotonic()))
        # a cluster that has just started still elects its leaders
        exists, differences = await _until(deadline, lambda: check_stream(stream, names), nats.errors.Error)
        await _until(deadline, lambda: ensure_stream(stream, names), nats.errors.Error)
        yield Provided(f"stream {names.event_stream}", _made(not exists), "; ".join(differences))
        exists = await _exists(stream.consumer_info(names.event_stream, names.ingest_consumer))
        await ensure_ingest_consumer(stream, names)
        yield Provided(f"consumer {names.ingest_consumer} of {names.event_stream}", _made(not exists))
        bucket = f"{settings.nats_namespace}_results"
        exists = await _exists(stream.key_value(bucket))
    finally:
        await client.close()
    yield await _store(StoreTier.KV, settings, deadline, bucket, made=not exists)


async def _exists(request: Awaitable[object]) -> bool:
    try:
        await request
    except nats.js.errors.NotFoundError:  # BucketNotFoundError too
        return False
    return True


async def _stores(settings: Settings, limits: _Limits) -> AsyncIterator[Provided]:
    buckets = {
        StoreTier.MINIO: settings.minio_bucket,
        StoreTier.S3: settings.s3_bucket,
        StoreTier.GCS: settings.gcs_bucket,
        StoreTier.PVC: str(settings.pvc_mount_path),
    }
    for tier in configured(settings):
        yield await _store(tier, settings, limits.deadline, buckets[tier] or "")


async def _store(tier: StoreTier, settings: Settings, deadline: float, place: str, *, made: bool = False) -> Provided:
    opened = open_tier(tier, settings, None)
    try:
        await _until(deadline, opened.ready, TierUnavailableError, OSError)
    except StorageError as error:
        return Provided(f"store {tier}", ProvisionState.REFUSED, _text_of(error))
    finally:
        await opened.close()
    return Provided(f"store {tier}", _made(made or opened.made_bucket), place)


async def _dagster(settings: Settings, limits: _Limits) -> AsyncIterator[Provided]:
    if "DAGSTER_HOME" not in os.environ:
        if settings.dagster_db_url is None:
            yield Provided("Dagster's storage", ProvisionState.THERE, "none is set: each process has its own")
            return
        os.environ["DAGSTER_HOME"] = str(embedded.dagster_home(settings))
    assert settings.db_url is not None
    # every connection of Dagster to PostgreSQL has this: others would wait behind a statement that waits
    os.environ["PGOPTIONS"] = f"{os.environ.get('PGOPTIONS', '')} -c lock_timeout={LOCK_TIMEOUT}".strip()
    async with _locked(settings.db_url, limits):
        made = False
        if settings.dagster_db_url is not None:
            async with _connected(settings.dagster_db_url, limits.deadline) as connection:
                made = await connection.fetchval("SELECT to_regclass('runs') IS NULL")
        changed = await _until(limits.deadline, partial(_upgraded, settings, limits), _NotYetError)
    state = ProvisionState.CHANGED if changed and not made else _made(made)
    yield Provided("Dagster's storage", state, changed)


class _NotYetError(ServiceError):
    """Dagster's storage does not answer yet."""


async def _upgraded(settings: Settings, limits: _Limits) -> str:
    """As :func:`_upgrade`, and again while tables are locked."""

    async def attempt() -> str:
        try:
            return await asyncio.to_thread(_upgrade)
        except HeldError as error:
            if settings.dagster_db_url is None:
                raise
            async with _connected(settings.dagster_db_url, limits.deadline) as connection:
                raise HeldError(f"{error}; {await holders(connection)}; let them end") from error

    def note(error: BaseException, pause: float) -> None:
        logger.warning("Dagster's storage waits for a table: %s; trying again in %.2g s", error, pause)

    return await with_retries(attempt, RetryLimits((HeldError,), seconds=limits.lock_seconds), on_failure=note)


def _upgrade() -> str:
    """Creates Dagster's tables, upgrades them to its version, and returns the storages that were outdated."""
    from dagster import DagsterInstance  # takes long to import
    from sqlalchemy.exc import DBAPIError

    try:
        with DagsterInstance.get() as instance:
            assert instance.get_runs_count() >= 0  # each storage creates its tables on first use
            assert instance.event_log_storage
            assert instance.schedule_storage
            outdated = [
                name
                for name, revisions in (yaml.safe_load(instance.schema_str()) or {}).get("schema", {}).items()
                if revisions and revisions["current"] != revisions["latest"]
            ]
            if outdated:
                instance.upgrade()
            return ", ".join(outdated)
    except DBAPIError as error:
        if getattr(error.orig, "pgcode", None) == LOCK_NOT_AVAILABLE:
            raise HeldError(f"Dagster's storage was not changed: {_text_of(error.orig or error)}") from error
        raise _NotYetError(f"{error.orig}; {DAGSTER_REMEDY}") from error


@asynccontextmanager
async def _locked(url: str, limits: _Limits) -> AsyncIterator[asyncpg.Connection]:
    """Yields a connection with the lock that one provisioning process at a time holds."""
    async with _connected(url, limits.deadline) as connection:
        await connection.execute(f"SET lock_timeout = {round(limits.lock_seconds * 1000) or 1}")
        try:
            await connection.execute("SELECT pg_advisory_lock($1)", LOCK)
        except asyncpg.LockNotAvailableError as error:
            raise HeldError(f"another process provisions; {await holders(connection)}") from error
        yield connection


@asynccontextmanager
async def _connected(url: str, deadline: float) -> AsyncIterator[asyncpg.Connection]:
    try:
        connect_ = partial(connect_to_database, url, timeout=CONNECT_SECONDS)
        connection = await _until(deadline, connect_, *NOT_YET)
    except NOT_YET as error:
        raise ServiceError(
            f"no server answers at {place_of(url)}: {_text_of(error)}; check host and port, and that this machine may "
            "connect"
        ) from error
    try:
        yield connection
    finally:
        await connection.close()


async def _until(deadline: float, work: Callable[[], Awaitable[T]], *failures: type[Exception]) -> T:
    """Repeats work until it succeeds or the time is over."""
    limits = RetryLimits(failures, seconds=max(deadline - time.monotonic(), 0.0), longest_pause=2.0)
    return await with_retries(work, limits)


def _made(made: bool) -> ProvisionState:
    return ProvisionState.MADE if made else ProvisionState.THERE


def _text_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
