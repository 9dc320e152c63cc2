"""NATS: the connection that survives outages, the names in use, and the stream of worker events.

A missing stream or consumer is created. An existing one with other settings is reported and never changed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import lru_cache
from typing import Any, NamedTuple

import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from noetl_dagster.errors import EventRefusedError, ServiceError
from noetl_dagster.setting_types import without_login
from noetl_dagster.settings import DEFAULT_POOL, Settings

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Time in which a server must accept a connection, as PostgreSQL's must."""

RECONNECT_SECONDS = 0.25
PENDING_BYTES = 64 * 1024**2
"""Messages published while the server is unavailable wait in memory, up to this size."""

EVENT_AGE_SECONDS = 3600.0
EVENT_BYTES = 65_536
DUPLICATE_WINDOW_SECONDS = 120.0
ACK_SECONDS = 30.0
INGEST_PENDING = 50_000

BATCH_TYPE = "batch"
"""Takes the place of the event type in the subject of a message with several events."""

_COMPARED = ("subjects", "retention", "storage", "max_age", "max_msg_size", "num_replicas")
_NOT_IN_A_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")


class NatsNames:
    """NATS names of one installation, in the namespace of its settings."""

    def __init__(self, settings: Settings) -> None:
        namespace = settings.nats_namespace
        self.event_stream = f"{namespace.upper()}_WORKER_EVENTS"
        self.event_prefix = f"{namespace}.events"
        self.commands = f"{namespace}.commands"  # of the default pool: commands wait
        self.capacity = f"{namespace}.workers"  # prefix of the workers' capacity reports
        self.replicas = settings.nats_replicas  # copies of a stream in a cluster
        self.ingest_consumer = "server-worker-events"  # durable, shared by all ingestors

    def event_subject(self, pool: str, worker_id: str, execution_id: int, event_type: str) -> str:
        """Returns ``noetl.events.<pool>.<worker id>.<execution id>.<event type>``."""
        return f"{self.event_prefix}.{pool}.{subject_token(worker_id)}.{execution_id}.{event_type}"

    def sender(self, subject: str) -> Sender:
        """Returns the sender that the subject of an event names, by which the server's permissions restrict it.

        Raises:
            EventRefusedError: it names none.
        """
        parts = subject.removeprefix(f"{self.event_prefix}.").split(".", 3)
        if len(parts) == 4 and parts[2].isdecimal():
            return Sender(parts[0], parts[1])
        raise EventRefusedError(
            f"subject {subject[:200]} is not {self.event_prefix}.<pool>.<worker>.<execution>.<type>"
        )

    def broadcast(self, pool: str) -> str:
        """Returns the subject for all workers of a pool, ``noetl.commands`` or ``noetl.commands.pool.<pool>``."""
        return self.commands if pool == DEFAULT_POOL else f"{self.commands}.pool.{pool}"

    def targeted(self, pool: str, worker_id: str) -> str:
        """Returns the subject for one worker, ``noetl.commands.pool.<pool>.<worker id>``."""
        return f"{self.commands}.pool.{pool}.{subject_token(worker_id)}"

    def capacity_of(self, pool: str, worker_id: str) -> str:
        """Returns the subject of a worker's capacity reports, ``noetl.workers.<pool>.<worker id>``."""
        return f"{self.capacity}.{pool}.{subject_token(worker_id)}"


class Sender(NamedTuple):
    """The pool and the worker, as one token, that a subject names."""

    pool: str
    worker: str


@lru_cache(maxsize=1024)
def subject_token(name: str) -> str:
    """Returns a name as one token of a subject: dots and the like become hyphens."""
    return _NOT_IN_A_TOKEN.sub("-", name) or "-"


class NatsClient(Client):
    """A client with the installation's names, which replaces bytes of subjects that are not UTF-8 by U+FFFD.

    A server accepts any bytes as a subject, but nats-py stops reading for good at such a one.
    """

    names: NatsNames
    settings: Settings

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        subject, reply = (text.decode(errors="replace").encode() for text in (subject, reply))
        return super()._build_message(sid, subject, reply, data, headers)


def worker_inbox(pool: str, worker_id: str) -> str:
    """Returns the prefix of a worker's inboxes, so that it needs no permission for those of others."""
    return f"_INBOX.worker.{pool}.{subject_token(worker_id)}"


async def connect(settings: Settings, name: str, *, inbox: str = "_INBOX", seconds: float | None = None) -> NatsClient:
    """Connects to the settings' server; the connection reconnects forever.

    Args:
        name: shown by the server's monitoring.
        inbox: prefix of the subjects of answers.
        seconds: time limit; default: :data:`CONNECT_SECONDS`.

    Raises:
        ServiceError: the server cannot be reached in time.
    """
    if settings.nats_url is None:
        raise ServiceError("no NATS server is known; set NOETL_NATS_URL or run 'noetl-dagster services up'")

    seconds = seconds or CONNECT_SECONDS
    client = NatsClient()
    client.names, client.settings = NatsNames(settings), settings
    latest: Exception | None = None

    async def on_error(error: Exception) -> None:
        nonlocal latest
        latest = error
        logger.debug("NATS (%s): %r", name, error)

    async def on_disconnect() -> None:
        if not client.is_closed:
            logger.warning("NATS (%s): connection lost; reconnecting", name)

    try:
        async with asyncio.timeout(seconds):  # nats-py itself would try forever
            await client.connect(
                settings.nats_servers,
                tls=settings.nats_tls,
                name=f"{settings.nats_namespace} {name}",
                connect_timeout=seconds,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_SECONDS,
                pending_size=PENDING_BYTES,
                inbox_prefix=inbox,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
            )
    except Exception as error:
        raise ServiceError(
            f"NATS at {','.join(map(without_login, settings.nats_servers))} cannot be reached: {latest or error!r}; "
            "check NOETL_NATS_URL and NOETL_NATS_CA"
        ) from None
    return client


def event_stream_config(names: NatsNames) -> StreamConfig:
    """Returns the settings of the stream of worker events: work queue, file storage, 1 h, 64 KiB a message."""
    return StreamConfig(
        name=names.event_stream,
        subjects=[f"{names.event_prefix}.>"],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        max_age=EVENT_AGE_SECONDS,
        max_msg_size=EVENT_BYTES,
        num_replicas=names.replicas,
        duplicate_window=DUPLICATE_WINDOW_SECONDS,
    )


async def check_stream(stream: JetStreamContext, names: NatsNames) -> tuple[bool, list[str]]:
    """Returns whether the stream exists, and a line for each of its settings that differs; creates nothing."""
    try:
        actual = (await stream.stream_info(names.event_stream)).config
    except nats.js.errors.NotFoundError:
        return False, []
    wanted, differences = event_stream_config(names), []
    for field in _COMPARED:
        ours, theirs = (_plain(getattr(config, field)) for config in (wanted, actual))
        if ours != theirs:
            differences.append(
                f"stream {names.event_stream}: {field} is {theirs}, not {ours}; it is left as it is "
                f"(nats stream edit {names.event_stream})"
            )
    return True, differences


async def ensure_stream(stream: JetStreamContext, names: NatsNames) -> list[str]:
    """Creates the stream if it is missing. Returns the lines of :func:`check_stream` for one that exists."""
    exists, differences = await check_stream(stream, names)
    if not exists:
        try:
            await stream.add_stream(event_stream_config(names))
            return []
        except nats.js.errors.BadRequestError:  # another process has just created it
            _, differences = await check_stream(stream, names)
    for line in differences:
        logger.warning("%s", line)
    return differences


async def ensure_ingest_consumer(stream: JetStreamContext, names: NatsNames) -> None:
    """Creates the durable consumer that every ingestor pulls from, if it is missing."""
    config = ConsumerConfig(
        durable_name=names.ingest_consumer,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_SECONDS,
        max_ack_pending=INGEST_PENDING,
        max_deliver=-1,  # the ingestor itself moves hopeless messages to the dead letters
    )
    try:
        await stream.consumer_info(names.event_stream, names.ingest_consumer)
    except nats.js.errors.NotFoundError:
        await stream.add_consumer(names.event_stream, config)  # creating it twice is harmless


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
