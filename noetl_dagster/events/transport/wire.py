"""Events as JSON messages, as workers and the API exchange them (docs/reference/worker-protocol.md)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    Field,
    PlainSerializer,
    ValidationError,
)
from pydantic_core import from_json, to_json

from noetl_dagster.errors import EventRefusedError, first_invalid
from noetl_dagster.events.transport.base import WORKER_EVENTS
from noetl_dagster.events.types import COMMAND_ENDS, SHARD_ENDS, Event
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.values import encode_json

CLIENT_HEADER = "X-NoETL-Client"
"""Header of requests to ``/api``, with the name of the program. Forms and redirects cannot set it."""

CLOCK_SKEW_SECONDS = 30.0
"""If a worker's clock is off by more, the receiver's time is stored instead."""

_RESULT_KEYS = frozenset({"status", "context", "reference", "data", "extracted"})


def _without_nul(text: str) -> str:
    return text.replace("\x00", "\ufffd")


def _result(value: dict[str, Any]) -> dict[str, Any]:
    if "status" not in value or not value.keys() <= _RESULT_KEYS:
        raise ValueError(f"a result has 'status' and may have {', '.join(sorted(_RESULT_KEYS - {'status'}))}")
    return value


Id = Annotated[
    int,
    Field(ge=0, lt=2**63, description="63-bit identifier, as text or as a number"),
    PlainSerializer(str, when_used="json"),  # not every language's numbers hold 63 bits
]
Text = Annotated[str, AfterValidator(_without_nul)]
Name = Annotated[str, Field(max_length=512), AfterValidator(_without_nul)]


class EventLimits(NamedTuple):
    """Sizes of a worker's event as JSON: of all its content, and of a result that it carries inline."""

    event_bytes: int = 1024**2
    inline_bytes: int = 8 * 1024

    @classmethod
    def of(cls, settings: Settings) -> EventLimits:
        """Returns the limits of the settings."""
        return cls(settings.event_bytes, settings.inline_result_bytes)

    def check(self, message: EventMessage) -> None:
        """Raises ``EventRefusedError`` for a message above a limit."""
        payload = message.payload
        size = _size((message.meta, payload.context, payload.result, payload.error, payload.current_item))
        if size > self.event_bytes:
            raise EventRefusedError(
                f"the event has {size} bytes of JSON, above {self.event_bytes} (NOETL_EVENT_BYTES); store the result "
                "and write less with 'set'"
            )
        # other encoders write some numbers longer
        if size > self.inline_bytes and payload.result is not None and "data" in payload.result:
            size = _size(payload.result["data"])
            if size > self.inline_bytes + self.inline_bytes // 8:
                raise EventRefusedError(
                    f"payload.result.data has {size} bytes of JSON, above {self.inline_bytes} "
                    "(NOETL_INLINE_RESULT_BYTES, the same for workers, API and ingestors); store it, send its reference"
                )


def _size(content: Any) -> int:
    try:
        return len(orjson.dumps(content))
    except TypeError:  # an integer above 64 bits, which the log refuses
        return len(to_json(content))


class RefusedEvent(NamedTuple):
    """An entry of a batch that is not a valid event: its position, its JSON, and the reason."""

    position: int
    content: bytes
    reason: str


class EventPayload(BaseModel, frozen=True):
    """The payload of an event.

    Attributes:
        node_name: the step.
        node_type: kind of the tool.
        status: status of the step or command after the event.
        catalog_id: the text of the playbook, in the catalog.
        parent_event_id: the event that caused this one.
        parent_execution_id: the execution that started this one.
        context: further facts of the event; see the list of events.
        result: the result, or a reference to it.
        error: the error.
        current_index: the iteration, from 0.
        current_item: the item of the iteration, if it is small.
    """

    node_name: Name | None = None
    node_type: Name | None = None
    status: Name | None = None
    catalog_id: Id | None = None
    parent_event_id: Id | None = None
    parent_execution_id: Id | None = None
    duration: Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds")] | None = None
    context: dict[str, Any] | None = None
    result: Annotated[dict[str, Any], AfterValidator(_result)] | None = None
    error: Text | None = None
    current_index: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    current_item: Any = None


class EventMessage(BaseModel, frozen=True):
    """One event in transit. The emitter creates ``event_id``, so that sending it twice is harmless.

    Attributes:
        event_type: name of the event, such as ``command.completed``.
        payload: the fields that depend on the type.
        meta: identifies the command, its visit and its attempt.
        worker_id: the process that emitted it.
    """

    execution_id: Id
    event_id: Id
    event_type: Annotated[str, Field(max_length=64)]
    payload: EventPayload = EventPayload()
    meta: dict[str, Any] = Field(default_factory=dict)
    worker_id: Name | None = None
    timestamp: AwareDatetime | None = Field(None, description="when the emitter made it, by its own clock")

    def event(self, received: datetime) -> Event:
        """Returns the row of the log.

        ``received`` replaces a timestamp that differs from it by more than :data:`CLOCK_SKEW_SECONDS`;
        ``meta.clock_skew`` then holds the seconds by which the emitter's clock was ahead.
        """
        meta, made = self.meta, self.timestamp or received
        skew = (made - received).total_seconds()
        if abs(skew) > CLOCK_SKEW_SECONDS:
            made, meta = received, {**meta, "clock_skew": round(skew, 3)}
        return Event(
            execution_id=self.execution_id,
            event_id=self.event_id,
            event_type=self.event_type,
            meta=meta,
            worker_id=self.worker_id,
            created_at=made,
            **vars(self.payload),
        )


def kept_event(message: EventMessage) -> Event:
    """Returns an event of the log, as it was written, from the message that a worker received."""
    return message.event(message.timestamp or datetime.now(UTC))


_PAYLOAD = tuple(EventPayload.model_fields)
_IDS = frozenset({"catalog_id", "parent_event_id", "parent_execution_id"})


def message_of(event: Event) -> dict[str, Any]:
    """Returns an event as a message. Identifiers are text, as in :data:`Id`."""
    payload = {}
    for name in _PAYLOAD:
        value = getattr(event, name)
        if value is not None:
            payload[name] = str(value) if name in _IDS else value
    if event.error is not None:
        payload["error"] = SECRETS.redact(event.error)
    return {
        "execution_id": str(event.execution_id),
        "event_id": str(event.event_id),
        "event_type": str(event.event_type),
        "payload": payload,
        "meta": event.meta,
        "worker_id": event.worker_id,
        "timestamp": (event.created_at or datetime.now(UTC)).isoformat(),
    }


def encode_event(event: Event) -> bytes:
    """Returns an event as the bytes of one message."""
    return encode_json(message_of(event))


def encode_batch(contents: Sequence[bytes]) -> bytes:
    """Returns encoded events as one message, ``{"events": [...]}``, as ``POST /api/events/batch`` takes them."""
    return b'{"events":[' + b",".join(contents) + b"]}"


def decode_message(content: bytes, received: datetime, limits: EventLimits) -> list[Event | RefusedEvent]:
    """Returns the events of a worker's message, one or a batch. An invalid event of a batch affects no other.

    Raises:
        EventRefusedError: the message is neither an event nor a batch, or a worker may not emit its only event.
    """
    try:
        message = from_json(content)  # it keeps integers of any length
    except ValueError as error:
        raise EventRefusedError(f"not an event: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("events"), list):
        return [_event(message, received, limits)]
    events: list[Event | RefusedEvent] = []
    for position, one in enumerate(message["events"]):
        try:
            events.append(_event(one, received, limits))
        except EventRefusedError as error:
            events.append(RefusedEvent(position, to_json(one), str(error)))
    return events


def _event(fields: Any, received: datetime, limits: EventLimits) -> Event:
    try:
        message = EventMessage.model_validate(fields)
    except ValidationError as error:
        raise EventRefusedError(f"not an event: {first_invalid(error)}") from None
    return accepted(message, received, limits)


def accepted(message: EventMessage, received: datetime, limits: EventLimits) -> Event:
    """Returns the event of a well-formed message.

    Raises:
        EventRefusedError: a worker may not emit it, or it is too large.
    """
    limits.check(message)
    if message.event_type not in WORKER_EVENTS:
        allowed = ", ".join(sorted(WORKER_EVENTS))
        raise EventRefusedError(f"a worker may not emit {message.event_type[:64]!r}; it may emit {allowed}")
    meta, index = message.meta, message.payload.current_index
    if not isinstance(meta.get("command_id"), str):
        raise EventRefusedError("meta.command_id is missing: events of workers belong to a command")
    if not message.worker_id:
        raise EventRefusedError("worker_id is missing: events of workers name their sender")
    position = meta.get("iter_index")
    if position is not None and not (type(position) is int and 0 <= position < 2**31):
        raise EventRefusedError(f"meta.iter_index {position!r:.40} is no position of an item, which counts from 0")
    shard = "shard_id" in meta and not meta.get("part")
    if message.event_type in COMMAND_ENDS and shard is not (message.event_type in SHARD_ENDS):
        ends = "loop.shard.done or loop.shard.failed" if shard else "command.completed or command.failed"
        raise EventRefusedError(f"command {meta['command_id'][:200]} ends with {ends}, not {message.event_type}")
    event = message.event(received)
    event.current_index = position
    if index not in (None, event.current_index):
        raise EventRefusedError(f"payload.current_index {index} is not meta.iter_index of the command")
    return event
