"""Chunks: results that steps pass on before they are complete. The log keeps them as ``call.partial`` events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import asyncpg
import orjson

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.envelopes import OK, Envelope, from_result
from noetl_dagster.events.queries import CHUNK_ITERATIONS, CHUNKS, CHUNKS_TOLD
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.templates.chunks import row_count
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import Chunk, ToolCall
from noetl_dagster.worker.command import Command, CommandEvents


class Stream:
    """Chunks between a step and its takers, counted in the process that drives both. The chunks are in the log.

    Args:
        takers: by the name of each step that takes them, how many chunks may wait for it or be worked on by it.
    """

    def __init__(self, takers: Mapping[str, int]) -> None:
        self.has_ended = False
        self.has_failed = False
        self.is_taken = False
        self.told = 0
        self._ahead: set[int] = set()
        self._room = dict(takers)
        self._taken = dict.fromkeys(takers, 0)
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether every taker has room for one more chunk; nobody waits for takers that have not begun."""
        return not self.is_taken or all(
            self.told - taken < self._room[taker] for taker, taken in self._taken.items()
        )

    def tell(self, number: int) -> None:
        """A chunk is in the log. ``told`` counts them from the first without a gap."""
        if number >= self.told:
            self._ahead.add(number)
        while self.told in self._ahead:
            self._ahead.remove(self.told)
            self.told += 1
        self._wake()

    def begin(self) -> None:
        """The takers begin: from now on they are waited for."""
        self.is_taken = True

    def take(self, taker: str, count: int) -> None:
        """A taker is done with so many chunks, from the first without a gap."""
        if taker in self._taken:
            self._taken[taker] = count
            self._wake()

    def leave(self, taker: str) -> None:
        """A taker takes no more: nobody waits for it."""
        self._taken.pop(taker, None)
        self._wake()

    def end(self, *, failed: bool) -> None:
        """There will be no further chunks; after a failure some may be missing."""
        self.has_ended, self.has_failed = True, failed
        self._wake()

    async def changed(self) -> None:
        """Waits until something of this is another one."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


LEFT_OUT = "skipped"
"""Status of a chunk of which a step that takes it makes none."""

Place = tuple[int, str, int]
"""Execution, step and visit: what has one stream of chunks."""


@dataclass(slots=True)
class _Running:
    """A command whose tool may tell of chunks: in its last task, whose result is the step's.

    Attributes:
        ended: how many calls have told of their last chunk. A policy may have the task called again, for the next page.
        first: the number of the first chunk of the present call, after those of the calls before.
    """

    command: Command
    task: str
    ended: int = 0
    first: int = 0


class Streams:
    """The chunks that steps of this process make and take. The toolbox's ``ChunkLog``.

    Chunks of a visit are numbered from 0, whatever attempt of its command made them, and each number is in the log
    once: a producer that is run again goes on, or tells of the same chunks in vain.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, pool: asyncpg.Pool) -> None:
        self._buffer = buffer
        self._events = events
        self._pool = pool
        self._open: dict[Place, list[Stream]] = {}
        self._running: dict[str, _Running] = {}

    async def open(self, place: Place, takers: Mapping[str, int]) -> Stream:
        """The stream of a visit, whose chunks are taken in this process from now on; see :class:`Stream`.

        Whoever follows another driver of the visit has a stream of its own, which is told the same.
        """
        stream = Stream(takers)
        self._open.setdefault(place, []).append(stream)
        return stream

    async def refresh(self, place: Place, stream: Stream) -> None:
        """Tells a stream of all chunks that are in the log, which another driver may have written."""
        for number in await self.iterations(place):
            stream.tell(number)

    def close(self, place: Place, stream: Stream) -> None:
        """Nobody takes chunks of a stream any more."""
        streams = self._open[place]
        streams.remove(stream)
        if not streams:
            del self._open[place]

    def of(self, place: Place) -> Stream | None:
        """The stream of a visit whose chunks are taken in this process: of several drivers', the one that works."""
        streams = self._open.get(place, ())
        return next((stream for stream in streams if stream.is_taken), streams[-1] if streams else None)

    @contextmanager
    def running(self, command: Command, task: str) -> Iterator[None]:
        """Lets a command's calls of a task tell of chunks until the block ends; of an iteration it is one itself."""
        if command.index is None:
            self._running[command.command_id] = _Running(command, task)
        try:
            yield
        finally:
            self._running.pop(command.command_id, None)

    # -- what tools see ------------------------------------------------------------------------------

    def wanted(self, call: ToolCall) -> bool:
        running = self._of_call(call)
        return running is not None and place_of(running.command) in self._open

    async def told(self, call: ToolCall) -> Sequence[Chunk]:
        """What a call goes on from: chunks that a step may have taken, or its own, told before its process died."""
        running = self._of_call(call)
        if running is None:
            return ()
        rows = await self._pool.fetch(CHUNKS_TOLD, *_named(place_of(running.command)), running.ended)
        if not rows:
            return ()
        first = rows[0]
        own = (first["command_id"], first["context"].get("call")) == (call.command_id, _digest(call))
        if not own and not self.wanted(call):
            return ()
        running.first = first["chunk_index"]
        return [_chunk(row, running.first) for row in rows]

    async def tell(self, call: ToolCall, *chunks: Chunk) -> None:
        running = self._of_call(call)
        if running is None or not chunks:
            return
        events = []
        for chunk in chunks:
            number = running.first + chunk.index
            meta = {"chunk_index": number, "has_more": chunk.more, "row_count": chunk.ref.rows}
            kept = {"position": chunk.position, "ended": running.ended}
            kept |= {} if chunk.index else {"call": _digest(call)}
            envelope: Envelope = {"status": OK, "ref": chunk.ref}
            events.append(self._events.partial(running.command, envelope, meta, kept))
            if not chunk.more:
                running.ended, running.first = running.ended + 1, number + 1
        await self._tell(running.command, events)

    def _of_call(self, call: ToolCall) -> _Running | None:
        running = self._running.get(call.command_id)
        return running if running is not None and running.task == call.task.name else None

    # -- what the engine sees ------------------------------------------------------------------------

    async def tell_result(self, command: Command, index: int, envelope: Envelope, *, more: bool) -> None:
        """Tells of a result as one chunk: of an iteration, or of a tool that gives no others."""
        kept: Envelope = {key: envelope[key] for key in ("status", "data", "ref", "error") if key in envelope}
        meta = {"chunk_index": index, "has_more": more, "row_count": row_count(kept)}
        await self._tell(command, [self._events.partial(command, kept, meta)])

    async def leave_out(self, command: Command, index: int) -> None:
        """Tells that a step makes nothing of a chunk that it takes, so that nobody waits for it."""
        meta = {"chunk_index": index, "has_more": True, "row_count": 0}
        await self._tell(command, [self._events.partial(command, {"status": LEFT_OUT}, meta)])

    async def iterations(self, place: Place) -> dict[int, int | None]:
        """By number of each chunk of a visit that is in the log, the iteration whose result it is."""
        rows = await self._pool.fetch(CHUNK_ITERATIONS, *_named(place))
        return {row["chunk_index"]: row["current_index"] for row in rows}

    async def items(self, place: Place, start: int, stop: int) -> list[dict[str, Any]]:
        """The chunks of ``start <= number < stop`` as the steps get them that take them."""
        rows = await self._pool.fetch(CHUNKS, *_named(place), start, stop)
        return [_item(row) for row in rows]

    async def _tell(self, command: Command, events: Sequence[Event]) -> None:
        """Writes of chunks to the log at once, and returns when there is room for another one."""
        await self._buffer.append(events)
        streams = tuple(self._open.get(place_of(command), ()))
        for stream in streams:
            for event in events:
                stream.tell(event.meta["chunk_index"])
        for stream in streams:
            while not stream.has_room:
                await stream.changed()


def place_of(command: Command) -> Place:
    """What has the stream that a command's chunks are in."""
    return command.execution_id, command.step, command.visit


def _named(place: Place) -> tuple[int, str, str]:
    execution_id, step, visit = place
    return execution_id, step, str(visit)


def _chunk(row: Any, first: int) -> Chunk:
    ref = ResultRef.model_validate(row["result"]["reference"])
    return Chunk(row["chunk_index"] - first, ref, row["context"]["position"], row["has_more"])


def _digest(call: ToolCall) -> str:
    """What tells a call from others of its task: its number, and what it was rendered to."""
    asked = [call.task.name, call.number, call.config, call.input]
    return sha256(orjson.dumps(asked, default=str, option=orjson.OPT_NON_STR_KEYS)).hexdigest()


def _item(row: Any) -> dict[str, Any]:
    item = {key: row[key] for key in ("chunk_index", "row_count", "has_more")}
    envelope = from_result(row["result"])
    reference = envelope.get("ref")
    if reference is not None:
        return item | {"ref": reference.model_dump(mode="json", exclude_defaults=True)}
    if envelope["status"] != OK:
        return item | {"left_out": envelope["status"]}
    return item | {"data": envelope.get("data")}
