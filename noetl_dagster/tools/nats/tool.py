"""``kind: nats``: key-value buckets, messages and the object store of JetStream.

``subscribe`` reads the messages of a stream as rows, until there are enough or no more arrive.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import nats.errors
import nats.js.errors
import orjson
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext

from noetl_dagster.errors import CredentialError, ErrorKind, ServiceError, ToolError, kind_of, kind_of_status
from noetl_dagster.process.jetstream import KEPT_SECONDS, pages_of_keys, reading
from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.values import admit

PUBLISH_SECONDS = 10.0
BATCH = 500  # messages per request
ACK_SECONDS = 10.0
IDLE_SECONDS = 5.0  # without a message, after which a subscription without ``timeout`` ends
UNACKED_CHUNKS = 3  # one in the log, one that waits for its successor, one that is being gathered


class NatsOperation(StrEnum):
    """The operations of the tool."""

    KV_GET = "kv_get"
    KV_PUT = "kv_put"
    KV_DELETE = "kv_delete"
    KV_KEYS = "kv_keys"
    PUBLISH = "publish"
    OBJECT_PUT = "object_put"
    OBJECT_GET = "object_get"
    SUBSCRIBE = "subscribe"


class NatsTool(Tool):
    """One operation on a NATS server.

    Input: ``operation``; ``bucket`` and ``key`` for key-value and object operations, ``value`` for puts (text
    unchanged, everything else as JSON); ``subject``, ``value``, ``headers`` and ``ack`` for publish (with
    ``ack: true`` JetStream confirms it); ``auth`` (a nats credential; default: the settings' server). A put
    creates a missing bucket; ``ttl`` seconds then limits the age of its entries.

    subscribe reads the messages of a JetStream ``stream``, those with ``subject`` if that is set, until there are
    ``max_messages`` or none has arrived for ``timeout`` seconds (5): from ``start``, a sequence number (1), and after
    a restart from the last position. With ``durable``, the name of a consumer, which is created if missing, each
    message is acknowledged when its chunk is in the log.

    Output:
        subscribe a list of ``{subject, sequence, time, value}``, with ``headers`` if there are any;
        kv_get ``{key, value, revision, found}``, kv_put ``{key, revision}``, kv_delete ``{key, deleted}``,
        kv_keys ``{keys, count}``, publish ``{subject, bytes}`` and with ``ack`` ``stream`` and ``sequence``,
        object_put ``{key, size, digest}``, object_get ``{key, value, size}``. A value that is JSON comes back
        parsed, other text as text, bytes as base64 text with ``encoding: base64``.

    Raises ``ToolError`` of kind ``nats``, retryable for connections and time-outs.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the operation."""
        operation = call.word("operation", NatsOperation)
        try:
            credential = await context.credentials.resolve(call.auth, CredentialType.NATS)
            client = await context.clients.nats(credential)
            match operation:
                case NatsOperation.SUBSCRIBE:
                    return await _subscribe(client, call, context)
                case NatsOperation.PUBLISH:
                    return ToolResult(data=await _publish(client, call))
                case NatsOperation.OBJECT_PUT | NatsOperation.OBJECT_GET:
                    return ToolResult(data=await _object(operation, client, call))
                case _:
                    return ToolResult(data=await _key_value(operation, client, call))
        except CredentialError as error:
            raise call.error(str(error), error.kind, retryable=error.retryable) from None
        except (TimeoutError, ServiceError, nats.errors.Error, OSError) as error:
            raise _failed(call, operation, error) from None


async def _key_value(operation: NatsOperation, client: NatsClient, call: ToolCall) -> dict[str, Any]:
    """Reads or changes a key-value bucket; a missing one counts as empty."""
    key = "" if operation is NatsOperation.KV_KEYS else _field(call, "key")
    context, name = client.jetstream(), _field(call, "bucket")
    bucket: Any = None
    entry: Any = None
    try:
        bucket = await context.key_value(name)
    except nats.js.errors.NotFoundError:
        if operation is NatsOperation.KV_PUT:
            bucket = await context.create_key_value(bucket=name, ttl=call.config.get("ttl"))
    if operation is NatsOperation.KV_PUT:
        return {"key": key, "revision": await bucket.put(key, _encoded(call.config.get("value")))}
    if operation is NatsOperation.KV_KEYS:
        prefix = str(call.config.get("prefix") or call.config.get("key") or "")
        pages = [page async for page in pages_of_keys(context, name)] if bucket else []
        keys = sorted(key for page in pages for key in page if key.startswith(prefix))
        return {"keys": keys, "count": len(keys)}
    with suppress(nats.js.errors.KeyNotFoundError):
        entry = await bucket.get(key) if bucket else None
    if operation is NatsOperation.KV_DELETE:
        if entry is not None:
            await bucket.delete(key)
        return {"key": key, "deleted": entry is not None}
    if entry is None:
        return {"key": key, "value": None, "revision": None, "found": False}
    return {"key": key, **_decoded(entry.value or b"", call), "revision": entry.revision, "found": True}


async def _object(operation: NatsOperation, client: NatsClient, call: ToolCall) -> dict[str, Any]:
    """Reads or writes an object."""
    context, name, key = client.jetstream(), _field(call, "bucket"), _field(call, "key")
    try:
        bucket = await context.object_store(name)
    except nats.js.errors.NotFoundError:
        if operation is NatsOperation.OBJECT_GET:
            raise
        bucket = await context.create_object_store(bucket=name)
    if operation is NatsOperation.OBJECT_PUT:
        info = await bucket.put(key, _encoded(call.config.get("value")))
        return {"key": key, "size": info.size, "digest": info.digest}
    content = (await bucket.get(key)).data or b""
    return {"key": key, **_decoded(content, call), "size": len(content)}


async def _publish(client: NatsClient, call: ToolCall) -> dict[str, Any]:
    subject, payload = _field(call, "subject"), _encoded(call.config.get("value"))
    headers = {str(name): str(value) for name, value in (call.config.get("headers") or {}).items()} or None
    sent: dict[str, Any] = {"subject": subject, "bytes": len(payload)}
    if call.config.get("ack"):
        confirmed = await client.jetstream().publish(subject, payload, timeout=PUBLISH_SECONDS, headers=headers)
        return {**sent, "stream": confirmed.stream, "sequence": confirmed.seq}
    await client.publish(subject, payload, headers=headers)
    await client.flush()
    return sent


def _field(call: ToolCall, name: str) -> str:
    value = call.config.get(name, call.input.get(name))
    if value in (None, ""):
        raise call.error(f"{call.config.get('operation')} needs {name!r}")
    return str(value)


def _failed(call: ToolCall, operation: NatsOperation, error: Exception) -> ToolError:
    missing = isinstance(error, nats.js.errors.NotFoundError)
    lost = isinstance(error, ServiceError | OSError | TimeoutError | nats.errors.ConnectionClosedError)
    text = f"nats {operation} in step {call.step}: {str(error) or type(error).__name__}"
    return ToolError(
        text,
        kind="not_found" if missing else _kind_of(error),
        retryable=lost and not missing,
        code="NOT_FOUND" if missing else None,
    )


def _kind_of(error: Exception) -> ErrorKind:
    match error:
        case nats.js.errors.APIError(code=int(status)) if status >= 400:
            return kind_of_status(status)
        case nats.errors.AuthorizationError() | nats.errors.InvalidUserCredentialsError():
            return "auth"
        case nats.errors.MaxPayloadError():
            return "storage_quota"
        case TimeoutError():
            return "timeout"
        case nats.errors.ConnectionClosedError() | nats.errors.NoServersError() | OSError():
            return "connection"
    return kind_of(error)


async def _subscribe(client: NatsClient, call: ToolCall, context: ToolContext) -> ToolResult:
    """Reads the messages of one call."""
    chunks = ChunkedResult(call, context)
    if await chunks.seek():
        end = _Limits(client, call, (chunks.position or {}).get("messages", 0))
        if durable := call.config.get("durable"):
            return await _AckedMessages(client, call, chunks, end, str(durable)).read()
        await _read_messages(client, call, chunks, end)
    return await chunks.result()


async def _read_messages(client: NatsClient, call: ToolCall, chunks: ChunkedResult, end: _Limits) -> None:
    """Reads from a position of the stream; nothing is acknowledged, so other consumers are not affected."""
    context, position, gathering = client.jetstream(), chunks.position, Gathering(chunks.chunk_bytes)
    first = _number(call, "start", 1) or 1
    start = int(first if position is None else position["sequence"] + 1)
    subject, stream = await _source(call, context)
    while end.is_open:
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start,
            inactive_threshold=KEPT_SECONDS,
        )
        async with reading(context, subject, stream, config) as pull:
            while messages := await end.fetched(pull, BATCH):
                asked = time.monotonic()
                end.taken += len(messages)
                start = _sequence(messages[-1]) + 1
                position = {"sequence": start - 1, "messages": end.taken}
                for chunk in gathering.add([_row(message, call) for message in messages], position):
                    await chunks.put(chunk)
                if time.monotonic() - asked > KEPT_SECONDS / 2:  # the server may have dropped the consumer
                    break
    if (rest := gathering.rest()) is not None:
        await chunks.put(rest)


class _AckedMessages:
    """Messages of a durable consumer, each acknowledged when its chunk is in the log.

    A message that was in the log but not acknowledged when the process ended is delivered again, and then only
    acknowledged.
    """

    def __init__(self, client: NatsClient, call: ToolCall, chunks: ChunkedResult, end: _Limits, durable: str) -> None:
        self._client, self._context = client, client.jetstream()
        self._call, self._chunks, self._end, self._durable = call, chunks, end, durable
        # of the latest chunk that is in the log
        self._logged = set((chunks.position or {}).get("sequences", ()))
        self._waiting: list[Msg] = []  # of the one that is stored after it

    async def read(self) -> ToolResult:
        """Reads the messages until the end of the subscription."""
        subject, stream = await _source(self._call, self._context)
        pull = await self._context.pull_subscribe(subject, durable=self._durable, stream=stream)
        try:
            size = await self._size(pull)
            messages: list[Msg] = []
            while came := await self._end.fetched(pull, size - len(messages)):
                messages += await self._new(came, messages)
                if messages and (len(messages) >= size or self._chunks.wanted):
                    await self._put(messages)
                    messages = []
            if messages:
                await self._put(messages)
            result = await self._chunks.result()
            await self._acknowledge(self._waiting)
            return result
        finally:
            with suppress(nats.errors.Error):
                await pull.unsubscribe()

    async def _new(self, came: Sequence[Msg], messages: Sequence[Msg]) -> list[Msg]:
        """Returns the messages that this call has not read yet."""
        await self._acknowledge([message for message in came if _sequence(message) in self._logged])
        earlier = self._logged.union(map(_sequence, self._waiting), map(_sequence, messages))
        new = [message for message in came if _sequence(message) not in earlier]
        self._end.taken += len(new)
        return new

    async def _put(self, messages: list[Msg]) -> None:
        """Stores a chunk, and acknowledges the one before it, which is then in the log."""
        position = {"sequences": list(map(_sequence, messages)), "messages": self._end.taken}
        await self._chunks.put(Gathered([_row(message, self._call) for message in messages], position))
        await self._acknowledge(self._waiting)
        self._logged = set(map(_sequence, self._waiting))
        self._waiting = messages

    async def _acknowledge(self, messages: Sequence[Msg]) -> None:
        """Acknowledges messages; returns when the server has confirmed it."""
        answers = (self._client.request(message.reply, Msg.Ack.Ack, timeout=ACK_SECONDS) for message in messages)
        await asyncio.gather(*answers)

    async def _size(self, pull: JetStreamContext.PullSubscription) -> int:
        """Returns the messages of a chunk: the server sends no more while too many are not acknowledged."""
        pending = (await pull.consumer_info()).config.max_ack_pending or 0
        if 0 < pending < UNACKED_CHUNKS:
            raise self._call.error(
                f"consumer {self._durable} has max_ack_pending {pending}; a subscription needs at least "
                f"{UNACKED_CHUNKS}"
            )
        return min(BATCH, pending // UNACKED_CHUNKS) if pending > 0 else BATCH


class _Limits:
    """Determines the end of a subscription."""

    def __init__(self, client: NatsClient, call: ToolCall, taken: int) -> None:
        self.taken = taken  # messages so far, those of earlier runs included
        self._client = client
        self._most = _number(call, "max_messages", None)
        self._seconds = float(_number(call, "timeout", IDLE_SECONDS) or 0)
        self._idle = False

    @property
    def is_open(self) -> bool:
        """Reports whether more messages are wanted."""
        return not self._idle and (self._most is None or self.taken < self._most)

    async def fetched(self, pull: JetStreamContext.PullSubscription, size: int) -> list[Msg]:
        """Returns the next messages; none at the end."""
        if not self.is_open:
            return []
        wanted = size if self._most is None else min(size, int(self._most) - self.taken)
        try:
            return list(await pull.fetch(wanted, timeout=self._seconds))
        except TimeoutError:
            if not self._client.is_connected:  # messages may be missed
                raise nats.errors.ConnectionClosedError from None
            self._idle = True
            return []


async def _source(call: ToolCall, context: JetStreamContext) -> tuple[str, str]:
    """Returns subject and stream of the messages."""
    subject, stream = call.config.get("subject"), call.config.get("stream")
    if not (subject or stream):
        raise call.error("subscribe needs 'stream' or 'subject'")
    if not stream:
        stream = await context.find_stream_name_by_subject(str(subject))
    return str(subject or ">"), str(stream)


def _row(message: Msg, call: ToolCall) -> dict[str, Any]:
    row = {
        "subject": message.subject,
        "sequence": _sequence(message),
        "time": message.metadata.timestamp.isoformat(),
        **_decoded(message.data, call),
    }
    return row | ({"headers": dict(message.headers)} if message.headers else {})


def _sequence(message: Msg) -> int:
    return int(message.metadata.sequence.stream)


def _number(call: ToolCall, name: str, default: float | None) -> float | None:
    value = call.config.get(name)
    try:
        number = default if value is None else float(value)
    except (TypeError, ValueError):
        number = -1
    if number is not None and number < 0:
        raise call.error(f"{name} {value!r} is no number from 0 on")
    return number


def _encoded(value: Any) -> bytes:
    """Returns text and bytes unchanged, everything else as JSON."""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else orjson.dumps(admit(value, "value"))


def _decoded(content: bytes, call: ToolCall) -> dict[str, Any]:
    """Returns ``{value}`` or ``{value, encoding: base64}`` of stored bytes."""
    try:
        return {"value": loads_exact(content, call.word("numbers", Numbers, Numbers.EXACT))}
    except InexactNumberError as error:
        raise call.error(str(error), "parse") from None
    except orjson.JSONDecodeError:
        pass
    try:
        return {"value": content.decode()}
    except UnicodeDecodeError:
        return {"value": base64.b64encode(content).decode(), "encoding": "base64"}
