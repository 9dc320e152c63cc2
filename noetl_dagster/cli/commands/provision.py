"""``provision``: everything that a deployment needs before its processes start, made where it is missing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import asyncpg
import nats.errors
import nats.js.errors
import typer
import yaml
from nats.js import JetStreamContext

from noetl_dagster import embedded
from noetl_dagster.cli.console import fail
from noetl_dagster.cli.doctor.finding import place_of
from noetl_dagster.errors import NoetlError, ServiceError, StorageError
from noetl_dagster.events.connection import check_certificates
from noetl_dagster.events.schema import apply_schema
from noetl_dagster.events.transport.nats import (
    check_stream,
    connect,
    ensure_ingest_consumer,
    ensure_stream,
)
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.settings import Settings, StoreTier, get_settings
from noetl_dagster.storage.readiness import configured
from noetl_dagster.storage.tiers import open_tier
from noetl_dagster.storage.tiers.base import MakesBuckets, TierUnavailableError

T = TypeVar("T")

LOCK = 7_306_002
"""Key of the advisory lock under which one process at a time changes Dagster's storage."""

CONNECT_SECONDS = 2.0

_DAGSTER = "check NOETL_DAGSTER_DB_URL, or dagster.yaml in DAGSTER_HOME"


class ProvisionState(StrEnum):
    """The result of providing one thing."""

    MADE = "made"
    THERE = "there"
    CHANGED = "changed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Provided:
    """A thing that a deployment needs; ``more`` says what it is like, or why it is refused and the remedy."""

    thing: str
    state: ProvisionState
    more: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.thing}" + (f": {self.more}" if self.more else "")


def provision(
    wait: Annotated[
        float, typer.Option(min=0, help="seconds to wait for services that are not up yet")
    ] = 60.0,
) -> None:
    """Make what a deployment needs: schema, partitions, streams, buckets, Dagster's storage. Safe twice."""
    settings = embedded.ensure(get_settings())
    if not asyncio.run(_provision(settings, time.monotonic() + wait)):
        fail("something is refused; see above, then run 'noetl-dagster provision' again")


async def _provision(settings: Settings, deadline: float) -> bool:
    """Prints a line for each thing as it is provided; reports whether none was refused."""
    well = True
    for thing, remedy, work in (
        ("event log", "check NOETL_DB_URL, and that its user may create in the database", _event_log),
        ("NATS", "check that JetStream is on", _nats),
        ("stores", "check the settings of the tier, and that the bucket is there", _stores),
        ("Dagster's storage", _DAGSTER, _dagster),
    ):
        try:
            async for one in work(settings, deadline):
                typer.echo(str(one))
                well = well and one.state is not ProvisionState.REFUSED
        except (
            NoetlError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            nats.errors.Error,
            OSError,
        ) as error:
            more = _words(error) if isinstance(error, NoetlError) else f"{_words(error)}; {remedy}"
            typer.echo(str(Provided(thing, ProvisionState.REFUSED, more)))
            well = False
    return well


async def _event_log(settings: Settings, deadline: float) -> AsyncIterator[Provided]:
    if settings.db_url is None:
        raise ServiceError("no database is set; set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    url = settings.db_url
    async with _locked(url, deadline) as connection:
        had = await connection.fetchval("SELECT to_regnamespace('noetl') IS NOT NULL")
    applied = await apply_schema(url)
    state = (
        ProvisionState.THERE
        if not applied.changed
        else ProvisionState.CHANGED
        if had
        else ProvisionState.MADE
    )
    yield Provided("schema noetl", state, f"version {applied.schema.number}")
    for name in applied.partitions:
        yield Provided(f"partition noetl.{name}", ProvisionState.MADE)
    if not applied.partitions:
        yield Provided("partitions of noetl.event", ProvisionState.THERE, "three months ahead")


async def _nats(settings: Settings, deadline: float) -> AsyncIterator[Provided]:
    impatient = settings.model_copy(update={"nats_connect_seconds": CONNECT_SECONDS})
    client = await _until(deadline, lambda: connect(impatient, "provision"), (ServiceError,))
    names = client.names
    try:
        stream = client.jetstream(timeout=max(CONNECT_SECONDS, deadline - time.monotonic()))
        # a cluster that has just come up elects its leaders yet
        exists, differences = await _until(
            deadline, lambda: check_stream(stream, names), (nats.errors.Error,)
        )
        await _until(deadline, lambda: ensure_stream(stream, names), (nats.errors.Error,))
        state = ProvisionState.THERE if exists else ProvisionState.MADE
        yield Provided(f"stream {names.event_stream}", state, "; ".join(differences))
        there = await _has_consumer(stream, names.event_stream, names.ingest_consumer)
        await ensure_ingest_consumer(stream, names)
        state = ProvisionState.THERE if there else ProvisionState.MADE
        yield Provided(f"consumer {names.ingest_consumer} of {names.event_stream}", state)
        bucket = f"{settings.nats_namespace}_results"
        there = await _has_bucket(stream, bucket)
    finally:
        await client.close()
    yield await _store(
        StoreTier.KV, settings, deadline, ProvisionState.THERE if there else ProvisionState.MADE, bucket
    )


async def _stores(settings: Settings, deadline: float) -> AsyncIterator[Provided]:
    buckets = {
        StoreTier.MINIO: settings.minio_bucket,
        StoreTier.S3: settings.s3_bucket,
        StoreTier.GCS: settings.gcs_bucket,
        StoreTier.PVC: str(settings.pvc_mount_path),
    }
    for tier in configured(settings):
        yield await _store(tier, settings, deadline, ProvisionState.THERE, buckets[tier] or "")


async def _store(
    tier: StoreTier, settings: Settings, deadline: float, state: ProvisionState, place: str
) -> Provided:
    opened = open_tier(tier, settings, None)
    try:
        await _until(deadline, opened.ready, (TierUnavailableError, OSError))
    except StorageError as error:
        return Provided(f"store {tier}", ProvisionState.REFUSED, _words(error))
    finally:
        await opened.close()
    made = isinstance(opened, MakesBuckets) and opened.made_bucket
    return Provided(f"store {tier}", ProvisionState.MADE if made else state, place)


async def _dagster(settings: Settings, deadline: float) -> AsyncIterator[Provided]:
    if "DAGSTER_HOME" not in os.environ:
        if settings.dagster_db_url is None:
            yield Provided("Dagster's storage", ProvisionState.THERE, "none is set: each process has its own")
            return
        os.environ["DAGSTER_HOME"] = str(embedded.dagster_home(settings))
    assert settings.db_url is not None
    async with _locked(settings.db_url, deadline):
        made = settings.dagster_db_url is not None and not await _has_runs(settings.dagster_db_url, deadline)
        changed = await _until(deadline, lambda: asyncio.to_thread(_upgrade), (_NotYetError,))
    state = ProvisionState.MADE if made else ProvisionState.CHANGED if changed else ProvisionState.THERE
    yield Provided("Dagster's storage", state, changed)


def _upgrade() -> str:
    """Makes Dagster's tables and brings them up to its version; says what was behind."""
    from dagster import DagsterInstance  # much to import
    from sqlalchemy.exc import DBAPIError

    try:
        with DagsterInstance.get() as instance:
            assert instance.get_runs_count() >= 0  # each storage makes its tables when it is first used
            assert instance.event_log_storage
            assert instance.schedule_storage
            behind = [
                name
                for name, found in (yaml.safe_load(instance.schema_str()) or {}).get("schema", {}).items()
                if found and found["current"] != found["latest"]
            ]
            if behind:
                instance.upgrade()
            return ", ".join(behind)
    except DBAPIError as error:
        raise _NotYetError(f"{error.orig}; {_DAGSTER}") from error


class _NotYetError(ServiceError):
    """Dagster's storage does not answer yet."""


async def _has_runs(url: str, deadline: float) -> bool:
    connection = await _connected(url, deadline)
    try:
        return bool(await connection.fetchval("SELECT to_regclass('runs') IS NOT NULL"))
    finally:
        await connection.close()


@asynccontextmanager
async def _locked(url: str, deadline: float) -> AsyncIterator[asyncpg.Connection]:
    """A connection that one provisioning at a time has."""
    connection = await _connected(url, deadline)
    try:
        await connection.execute("SELECT pg_advisory_lock($1)", LOCK)
        yield connection
    finally:
        await connection.close()


async def _connected(url: str, deadline: float) -> asyncpg.Connection:
    check_certificates(url)
    failures = (OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError)
    try:
        return await _until(deadline, lambda: asyncpg.connect(url, timeout=CONNECT_SECONDS), failures)
    except failures as error:
        where = place_of(url)
        raise ServiceError(
            f"nobody answers at {where}: {_words(error)}; check host and port, and that this machine may connect"
        ) from error


async def _until(
    deadline: float, work: Callable[[], Awaitable[T]], failures: tuple[type[Exception], ...]
) -> T:
    """Does work until it succeeds or the time is over."""
    patience = RetryLimits(failures, seconds=max(deadline - time.monotonic(), 0.0), longest_pause=2.0)
    return await with_retries(work, patience)


async def _has_consumer(stream: JetStreamContext, owner: str, name: str) -> bool:
    try:
        await stream.consumer_info(owner, name)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def _has_bucket(stream: JetStreamContext, bucket: str) -> bool:
    try:
        await stream.key_value(bucket)
    except nats.js.errors.BucketNotFoundError:
        return False
    return True


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
