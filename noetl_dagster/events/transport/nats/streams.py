"""The JetStream streams and consumers. Missing ones are made; what differs is reported, never changed."""

from __future__ import annotations

import logging
from typing import Any

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from noetl_dagster.events.transport.nats.names import Names, subject_token
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)

EVENT_AGE_SECONDS = 3600.0
EVENT_BYTES = 65_536
COMMAND_AGE_SECONDS = 24 * 3600.0
DUPLICATE_WINDOW_SECONDS = 120.0
ACK_SECONDS = 30.0
INGEST_PENDING = 50_000
WORKER_GONE_SECONDS = 3600.0
"""A worker's own consumer is removed by the server when the worker has been away for so long."""

_COMPARED = ("subjects", "retention", "storage", "max_age", "max_msg_size", "num_replicas")


def stream_configs(settings: Settings) -> list[StreamConfig]:
    """The streams as they are made.

    ``NOETL_WORKER_EVENTS`` is the seed's ("Worker communication", migration step 1): work-queue retention,
    file storage, 1 h, 64 KiB messages. ``NOETL_COMMANDS`` carries notices of a few hundred bytes.
    """
    names = Names.of(settings)
    streams = {
        names.event_stream: ([f"{names.event_prefix}.>"], EVENT_AGE_SECONDS),
        names.command_stream: ([names.commands, f"{names.commands}.>"], COMMAND_AGE_SECONDS),
    }
    return [
        StreamConfig(
            name=name,
            subjects=subjects,
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_age=age,
            max_msg_size=EVENT_BYTES,
            num_replicas=settings.nats_replicas,
            duplicate_window=DUPLICATE_WINDOW_SECONDS,
        )
        for name, (subjects, age) in streams.items()
    ]


async def look_at_streams(stream: JetStreamContext, settings: Settings) -> tuple[list[str], list[str]]:
    """Names of the streams that are missing, and how others differ from those of this version; makes none."""
    missing: list[str] = []
    differences: list[str] = []
    for wanted in stream_configs(settings):
        try:
            differences += _differences(wanted, (await stream.stream_info(wanted.name or "")).config)
        except nats.js.errors.NotFoundError:
            missing.append(wanted.name or "")
    return missing, differences


async def ensure_streams(stream: JetStreamContext, settings: Settings) -> list[str]:
    """Makes the streams that are missing.

    Returns:
        One line for each setting of an existing stream that is not as this version makes it.
    """
    differences: list[str] = []
    for wanted in stream_configs(settings):
        try:
            found = (await stream.stream_info(wanted.name or "")).config
        except nats.js.errors.NotFoundError:
            try:
                await stream.add_stream(wanted)
                continue
            except nats.js.errors.BadRequestError:  # somebody else made it just now
                found = (await stream.stream_info(wanted.name or "")).config
        differences += _differences(wanted, found)
    for line in differences:
        logger.warning("%s", line)
    return differences


async def ensure_ingest_consumer(stream: JetStreamContext, names: Names) -> None:
    """Makes the durable consumer that every ingestor pulls from."""
    config = ConsumerConfig(
        durable_name=names.ingest_consumer,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_SECONDS,
        max_ack_pending=INGEST_PENDING,
        max_deliver=-1,  # the ingestor puts hopeless messages aside itself
    )
    await _ensure_consumer(stream, names.event_stream, config)


async def ensure_broadcast_consumer(stream: JetStreamContext, names: Names) -> None:
    """Makes the durable consumer of commands for any worker."""
    await _ensure_command_consumer(stream, names, names.broadcast_consumer, names.commands)


async def ensure_targeted_consumer(stream: JetStreamContext, names: Names, worker_id: str) -> str:
    """Makes the durable consumer of one worker's own commands and returns its name."""
    name = f"worker-{subject_token(worker_id)}"
    await _ensure_command_consumer(stream, names, name, names.targeted(worker_id), WORKER_GONE_SECONDS)
    return name


async def _ensure_command_consumer(
    stream: JetStreamContext, names: Names, name: str, subject: str, gone_after: float | None = None
) -> None:
    config = ConsumerConfig(
        durable_name=name,
        filter_subject=subject,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_SECONDS,
        max_deliver=-1,
        max_ack_pending=-1,
        inactive_threshold=gone_after,
    )
    await _ensure_consumer(stream, names.command_stream, config)


async def _ensure_consumer(stream: JetStreamContext, stream_name: str, config: ConsumerConfig) -> None:
    try:
        await stream.consumer_info(stream_name, config.durable_name or "")
    except nats.js.errors.NotFoundError:
        await stream.add_consumer(stream_name, config)  # making it twice with one configuration is harmless


def _differences(wanted: StreamConfig, found: StreamConfig) -> list[str]:
    lines = []
    for field in _COMPARED:
        ours, theirs = _plain(getattr(wanted, field)), _plain(getattr(found, field))
        if ours != theirs:
            lines.append(
                f"stream {wanted.name}: {field} is {theirs}, not {ours}; it is left as it is "
                f"(nats stream edit {wanted.name})"
            )
    return lines


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
