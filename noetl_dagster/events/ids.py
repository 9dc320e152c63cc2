"""Identifiers: snowflakes for executions, events and loops; deterministic names for commands."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from datetime import datetime

EPOCH_MS = 1_704_067_200_000  # 2024-01-01T00:00:00Z
NODE_BITS = 10
SEQUENCE_BITS = 12
_NODE_MASK = (1 << NODE_BITS) - 1
_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1


class Snowflake:
    """Generates 63-bit identifiers: 41 bits of milliseconds, 10 bits of node, 12 bits of sequence.

    Identifiers of one generator grow strictly, also when the clock steps back. Those of an execution grow from one
    driver to the next, whose clock may be behind: a driver follows the events that it has read.
    """

    def __init__(self, node: int) -> None:
        self._node = node & _NODE_MASK
        self._lock = threading.Lock()
        self._tick = 0  # milliseconds and sequence as one counter

    def next(self) -> int:
        """Returns a new identifier."""
        with self._lock:
            now = (time.time_ns() // 1_000_000 - EPOCH_MS) << SEQUENCE_BITS
            self._tick = now if now > self._tick else self._tick + 1
            tick = self._tick
        return (
            ((tick >> SEQUENCE_BITS) << (NODE_BITS + SEQUENCE_BITS))
            | (self._node << SEQUENCE_BITS)
            | (tick & _SEQUENCE_MASK)
        )

    def follow(self, identifier: int) -> None:
        """Makes all further identifiers greater than one of another generator (a Lamport clock)."""
        with self._lock:
            tick = (identifier >> (NODE_BITS + SEQUENCE_BITS) << SEQUENCE_BITS) | (identifier & _SEQUENCE_MASK)
            self._tick = max(self._tick, tick | _SEQUENCE_MASK)

    def take(self, count: int) -> list[int]:
        """Returns several new identifiers, in order."""
        return [self.next() for _ in range(count)]


def snowflake_milliseconds(identifier: int) -> int:
    """Returns the Unix time in milliseconds at which an identifier was created."""
    return (identifier >> (NODE_BITS + SEQUENCE_BITS)) + EPOCH_MS


def snowflake_floor(moment: datetime) -> int:
    """Returns the smallest identifier of a moment; partition bounds are such values."""
    return (int(moment.timestamp() * 1000) - EPOCH_MS) << (NODE_BITS + SEQUENCE_BITS)


def process_node() -> int:
    """Returns a node number for this process, if no database has assigned one."""
    seed = f"{os.uname().nodename}:{os.getpid()}:{time.monotonic_ns()}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=2).digest(), "big") & _NODE_MASK


def command_id(execution_id: int, step: str, visit: int = 1, iteration: int | None = None, attempt: int = 1) -> str:
    """Returns the id of a command, a function of its position in the execution: issuing it twice is harmless."""
    name = f"{execution_id}:{step}:{visit}"
    if iteration is not None:
        name += f":{iteration}"
    return f"{name}:{attempt}"
