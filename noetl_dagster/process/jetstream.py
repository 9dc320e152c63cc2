"""Reads of JetStream that end: a consumer of its own for each, and the keys of a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from nats.errors import Error
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext

KEPT_SECONDS = 600.0
"""How long the server keeps a consumer that asks for nothing."""

KEYS_AT_ONCE = 500
ANSWER_SECONDS = 10.0

_REMOVED = {"KV-Operation", "Nats-Marker-Reason"}
"""Headers of entries that stand for keys that were deleted, or have expired."""


@asynccontextmanager
async def reading(
    context: JetStreamContext, subject: str, stream: str, config: ConsumerConfig
) -> AsyncIterator[JetStreamContext.PullSubscription]:
    """Opens a consumer of a stream, and deletes it at the end."""
    pull = await context.pull_subscribe(subject, stream=stream, config=config)
    try:
        yield pull
    finally:
        with suppress(Error):  # otherwise the server forgets the consumer later
            consumer = (await pull.consumer_info()).name
            await pull.unsubscribe()
            await context.delete_consumer(stream, consumer)


async def pages_of_keys(context: JetStreamContext, bucket: str) -> AsyncIterator[list[str]]:
    """Yields the keys of a bucket that have a value, a page at a time.

    ``KeyValue.keys`` of nats-py returns none if the server has sent all of them before the client handles the first.
    """
    beginning = f"$KV.{bucket}."
    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        headers_only=True,
        inactive_threshold=KEPT_SECONDS,
    )
    async with reading(context, f"{beginning}>", f"KV_{bucket}", config) as pull:
        pending = (await pull.consumer_info()).num_pending or 0
        while pending:
            try:
                messages = await pull.fetch(min(pending, KEYS_AT_ONCE), timeout=ANSWER_SECONDS)
            except TimeoutError:
                if (await pull.consumer_info()).num_pending:
                    raise
                return  # the other keys were removed meanwhile
            pending = messages[-1].metadata.num_pending
            entries = (message for message in messages if not _REMOVED & (message.headers or {}).keys())
            yield [message.subject.removeprefix(beginning) for message in entries]
