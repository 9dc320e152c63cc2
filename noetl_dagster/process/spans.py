"""Spans as they are recorded, their ids, and the header that carries them (W3C Trace Context)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

TRACEPARENT = "traceparent"
"""Name of the header, over HTTP and NATS."""

Attributes = dict[str, str | int | float | bool]

_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW = (1 << 64) - 1


class SpanRef(NamedTuple):
    """Identifies a span."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """The header of a recorded trace; traces that are not sampled have no header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse(cls, header: str) -> SpanRef | None:
        """Returns the span of a ``traceparent`` header, or None if the header is invalid."""
        match = _SHAPE.fullmatch(header.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        span = cls(int(match[2], 16), int(match[3], 16))
        return span if all(span) else None


class SpanFailure(NamedTuple):
    """The kind of the error that ended a span, and its message without secrets."""

    kind: str
    message: str


@dataclass(slots=True)
class Span:
    """A span that the exporter sends.

    Attributes:
        start, end: nanoseconds since 1970.
        client: the span waits for the answer of another service.
    """

    ref: SpanRef
    parent: int | None
    name: str
    start: int
    end: int
    attributes: Attributes
    failure: SpanFailure | None = None
    link: SpanRef | None = None
    client: bool = False
    service: str | None = None


def trace_id_of(execution_id: int) -> int:
    """Returns 128 bits, never 0."""
    return int.from_bytes(blake2b(f"noetl/{execution_id}".encode(), digest_size=16).digest(), "big") or 1


def span_id_of(name: str) -> int:
    """Returns 64 bits, never 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") or 1


def any_span_id() -> int:
    """Returns a random id, for a span that no other process refers to."""
    return random.getrandbits(64) or 1


def is_sampled(trace_id: int, share: float) -> bool:
    """Returns True for the ``share`` (0..1) of all traces that is recorded. Every process decides alike."""
    return (trace_id & _LOW) < share * (1 << 64)
