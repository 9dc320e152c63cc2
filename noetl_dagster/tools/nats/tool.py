"""``kind: nats``: key-value buckets, messages and the object store of JetStream."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient

from noetl_dagster.errors import CredentialError, ErrorKind, ServiceError, ToolError, kind_of, kind_of_status
from noetl_dagster.tools.access.credentials import CredentialType
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.nats.subscription import decoded, encoded, subscribe

PUBLISH_SECONDS = 10.0


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

    kind = "nats"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        """Runs the operation."""
        given = call.config.get("operation")
        try:
            operation = NatsOperation(str(given))
        except ValueError:
            known = ", ".join(NatsOperation)
            raise call.error(f"operation {given!r} is unknown; known: {known}") from None
        try:
            credential = await box.credentials.resolve(call.auth, CredentialType.NATS)
            client = await box.clients.nats(credential)
            match operation:
                case NatsOperation.SUBSCRIBE:
                    return await subscribe(client, call, box)
                case NatsOperation.PUBLISH:
                    return ToolResult(data=await _publish(client, call))
                case NatsOperation.OBJECT_PUT | NatsOperation.OBJECT_GET:
                    return ToolResult(data=await _object(operation, client, call))
                case _:
                    return ToolResult(data=await _key_value(operation, client, call))
        except CredentialError as error:
            raise call.error(str(error), "credential", retryable=error.retryable) from None
        except (TimeoutError, ServiceError, nats.errors.Error, OSError) as error:
            raise _failed(call, operation, error, box) from None


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
        return {"key": key, "revision": await bucket.put(key, encoded(call.config.get("value")))}
    if operation is NatsOperation.KV_KEYS:
        prefix, keys = str(call.config.get("prefix") or call.config.get("key") or ""), []
        with suppress(nats.js.errors.NoKeysError):
            keys = sorted(one for one in await bucket.keys() if one.startswith(prefix)) if bucket else []
        return {"keys": keys, "count": len(keys)}
    with suppress(nats.js.errors.KeyNotFoundError):
        entry = await bucket.get(key) if bucket else None
    if operation is NatsOperation.KV_DELETE:
        if entry is not None:
            await bucket.delete(key)
        return {"key": key, "deleted": entry is not None}
    if entry is None:
        return {"key": key, "value": None, "revision": None, "found": False}
    return {"key": key, **decoded(entry.value or b""), "revision": entry.revision, "found": True}


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
        info = await bucket.put(key, encoded(call.config.get("value")))
        return {"key": key, "size": info.size, "digest": info.digest}
    content = (await bucket.get(key)).data or b""
    return {"key": key, **decoded(content), "size": len(content)}


async def _publish(client: NatsClient, call: ToolCall) -> dict[str, Any]:
    subject, payload = _field(call, "subject"), encoded(call.config.get("value"))
    headers = {str(name): str(value) for name, value in (call.config.get("headers") or {}).items()} or None
    sent: dict[str, Any] = {"subject": subject, "bytes": len(payload)}
    if call.config.get("ack"):
        confirmed = await client.jetstream().publish(
            subject, payload, timeout=PUBLISH_SECONDS, headers=headers
        )
        return {**sent, "stream": confirmed.stream, "sequence": confirmed.seq}
    await client.publish(subject, payload, headers=headers)
    await client.flush()
    return sent


def _field(call: ToolCall, name: str) -> str:
    value = call.config.get(name, call.input.get(name))
    if value in (None, ""):
        raise call.error(f"{call.config.get('operation')} needs {name!r}")
    return str(value)


def _failed(call: ToolCall, operation: NatsOperation, error: Exception, box: Toolbox) -> ToolError:
    missing = isinstance(error, nats.js.errors.NotFoundError)
    lost = isinstance(error, ServiceError | OSError | TimeoutError | nats.errors.ConnectionClosedError)
    text = f"nats {operation} in step {call.step}: {str(error) or type(error).__name__}"
    return ToolError(
        box.credentials.redact(text),
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
