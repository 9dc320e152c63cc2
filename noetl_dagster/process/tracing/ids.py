"""Ids of traces and spans, derived from names, and the header that carries them (W3C Trace Context)."""

from __future__ import annotations

import random
import re
from hashlib import blake2b
from typing import NamedTuple

TRACEPARENT = "traceparent"
"""Name of the header, over HTTP and NATS."""

_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW = (1 << 64) - 1


class Position(NamedTuple):
    """A span, as others refer to it."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """Of a trace that is recorded; of any other nobody is told."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse(cls, header: str) -> Position | None:
        """What a ``traceparent`` says; None where it is none."""
        found = _SHAPE.fullmatch(header.strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        position = cls(int(found[2], 16), int(found[3], 16))
        return position if all(position) else None


def trace_id_of(execution_id: int) -> int:
    """128 bits, never 0."""
    return int.from_bytes(blake2b(f"noetl/{execution_id}".encode(), digest_size=16).digest(), "big") or 1


def span_id_of(name: str) -> int:
    """64 bits, never 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") or 1


def any_span_id() -> int:
    """For a span that nobody else refers to."""
    return random.getrandbits(64) or 1


def is_sampled(trace_id: int, share: float) -> bool:
    """Whether a trace is among the ``share`` (0..1) that are recorded; every process decides alike."""
    return (trace_id & _LOW) < share * (1 << 64)
