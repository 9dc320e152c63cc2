"""Chunks: results that steps pass on before they are complete. The log keeps them as ``call.partial`` events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import asyncpg
import orjson

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.envelopes import OK, Envelope, from_result
from noetl_dagster.events.queries import CHUNK_ITERATIONS, CHUNKS, CHUNKS_RECORDED
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.templates.chunks import row_count
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import Chunk, ToolCall
from noetl_dagster.worker.command import Command, CommandEvents

LEFT_OUT = "skipped"
"""Status of a chunk of which the consuming step makes none."""

_NONE_PUBLISHED = nullcontext()

StreamKey = tuple[int, str, int]
"""Execution, step and visit, which have one stream of chunks."""


class ChunkStream:
    """Counts the chunks between a step and its consumers, in the process that drives both. The log has the chunks.

    Attributes:
        waiting: consumers that have nothing to do until a chunk arrives.

    Args:
        room: by consuming step, how many chunks may wait for it or be in work.
    """

    def __init__(self, key: StreamKey, room: Mapping[str, int]) -> None:
        self.key = key
        self.has_ended = False
        self.has_failed = False
        self.has_consumers = False
        self.waiting = 0
        self.published = 0
        self._being_written = 0
        self._ahead: set[int] = set()
        self._recent: dict[int, dict[str, Any]] = {}
        self._room = dict(room)
        self._consumed = dict.fromkeys(room, 0)
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Reports that every consumer has room for one more chunk; consumers that have not begun don't count."""
        begun = self.published + self._being_written
        return not self.has_consumers or all(begun - count < self._room[step] for step, count in self._consumed.items())

    def begin(self, count: int) -> None:
        """Counts chunks that are being written to the log."""
        self._being_written += count

    def written(self, count: int, new: Mapping[int, dict[str, Any]]) -> None:
        """Ends :meth:`begin`. ``new``: the chunks that are in the log now, as items of the loops that consume them."""
        self._being_written -= count
        if self.has_consumers:
            self._recent |= new

    def recent(self, start: int, stop: int) -> list[dict[str, Any]] | None:
        """Returns chunks of ``start <= number < stop`` if this process has written all of them a short time ago."""
        if not all(number in self._recent for number in range(start, stop)):
            return None
        return [self._recent[number] for number in range(start, stop)]

    def add(self, number: int) -> None:
        """Counts a chunk that is in the log. ``published`` counts them from the first without a gap."""
        if number >= self.published:
            self._ahead.add(number)
        while self.published in self._ahead:
            self._ahead.remove(self.published)
            self.published += 1
        self._wake()

    def consumed(self, step: str, count: int) -> None:
        """Sets how many chunks a consumer has done, from the first without a gap."""
        if step in self._consumed:
            self._consumed[step] = count
            self._forget()
            self._wake()

    def leave(self, step: str) -> None:
        """Removes a consumer: the producer does not wait for it any more."""
        self._consumed.pop(step, None)
        self._forget()
        self._wake()

    def end(self, *, failed: bool) -> None:
        """Marks the stream as complete; after a failure chunks may be missing."""
        self.has_ended, self.has_failed = True, failed
        self._wake()

    async def changed(self) -> None:
        """Waits for the next change of the counts or flags."""
        await self._changed.wait()

    def _forget(self) -> None:
        """Drops the chunks that every consumer has done."""
        done = min(self._consumed.values(), default=self.published)
        for number in [number for number in self._recent if number < done]:
            del self._recent[number]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class _PublishingCommand:
    """A command whose tool may publish chunks: in its last task, whose result is the step's.

    Attributes:
        ended: how many calls have published their last chunk. A policy may call the task again, for the next page.
        first: the number of the first chunk of the present call, after those of the calls before.
        writing: chunks that may not be in the log yet.
    """

    command: Command
    task: str
    ended: int = 0
    first: int = 0
    writing: deque[asyncio.Future[set[int]]] = field(default_factory=deque)


class ChunkStreams:
    """The chunks that steps of this process make and take. The toolbox's ``ChunkLog``.

    Chunks of a visit are numbered from 0 across the attempts of its command, and the log has each number once: a
    producer that runs again resumes, or publishes the same chunks without effect.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, pool: asyncpg.Pool) -> None:
        self._buffer = buffer
        self._events = events
        self._pool = pool
        self._open: dict[StreamKey, list[ChunkStream]] = {}
        self._running: dict[str, _PublishingCommand] = {}

    @contextmanager
    def open(self, key: StreamKey, room: Mapping[str, int]) -> Iterator[ChunkStream]:
        """Opens the stream of a visit for consumers in this process. Each driver of a visit has a stream of its own."""
        stream = ChunkStream(key, room)
        streams = self._open.setdefault(key, [])
        streams.append(stream)
        try:
            yield stream
        finally:
            streams.remove(stream)
            if not streams:
                del self._open[key]

    async def refresh(self, stream: ChunkStream) -> None:
        """Adds all chunks in the log to a stream; another driver may have written them."""
        for number in await self.iterations(stream.key):
            stream.add(number)

    def of(self, key: StreamKey) -> ChunkStream | None:
        """Returns the stream of a visit whose chunks this process consumes: of several drivers', the one that works."""
        streams = self._open.get(key, ())
        return next((stream for stream in streams if stream.has_consumers), streams[-1] if streams else None)

    def running(self, command: Command, task: str) -> AbstractContextManager[None]:
        """Lets a command's calls of a task publish chunks until the block ends, unless its result is a chunk itself."""
        return self._publishing(command, task) if command.index is None else _NONE_PUBLISHED

    @contextmanager
    def _publishing(self, command: Command, task: str) -> Iterator[None]:
        own = self._running[command.command_id] = _PublishingCommand(command, task)
        try:
            yield
        finally:
            if self._running.get(command.command_id) is own:  # not that of a later claim
                del self._running[command.command_id]

    # -- for tools -------------------------------------------------------------------------------------

    def wanted(self, call: ToolCall) -> bool:
        """Reports that a step consumes the chunks of a call."""
        running = self._of_call(call)
        return running is not None and running.command.visit_key in self._open

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        """Returns the chunks that a call resumes after: chunks that a step may have consumed, or the call's own."""
        running = self._of_call(call)
        if running is None:
            return ()
        rows = await self._pool.fetch(CHUNKS_RECORDED, *_parameters(running.command.visit_key), running.ended)
        if not rows:
            return ()
        first = rows[0]
        own = (first["command_id"], first["context"].get("call")) == (call.command_id, _call_digest(call))
        if not own and not self.wanted(call):
            return ()
        running.first = first["chunk_index"]
        return [
            Chunk(
                row["chunk_index"] - running.first,
                ResultRef.model_validate(row["result"]["reference"]),
                row["context"]["position"],
                row["has_more"],
            )
            for row in rows
        ]

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        """Publishes chunks of a call; returns when there is room for another one.

        They may not be in the log by then. After the last one, all of them are. Raises the failure of an earlier one.
        """
        running = self._of_call(call)
        if running is None or not chunks:
            return
        events = []
        for chunk in chunks:
            number = running.first + chunk.index
            meta = {"chunk_index": number, "has_more": chunk.more, "row_count": chunk.ref.rows}
            context = {"position": chunk.position, "ended": running.ended}
            context |= {} if chunk.index else {"call": _call_digest(call)}
            result = {"status": OK, "ref": chunk.ref}
            events.append(self._events.partial(running.command, result, meta, context))
            if not chunk.more:
                running.ended, running.first = running.ended + 1, number + 1
        running.writing.append(self._begin(running.command, events))
        if not chunks[-1].more:
            self._buffer.hurry()
        while running.writing and (running.writing[0].done() or not chunks[-1].more):
            await running.writing.popleft()
        await self.room(running.command.visit_key)

    def _of_call(self, call: ToolCall) -> _PublishingCommand | None:
        running = self._running.get(call.command_id)
        return running if running is not None and running.task == call.task.name else None

    # -- for the engine -------------------------------------------------------------------------------

    async def publish_result(self, command: Command, index: int, envelope: Envelope, *, more: bool) -> None:
        """Publishes a result as one chunk, for example that of a tool that publishes no others."""
        await self._publish(command, [self._result(command, index, envelope, more=more)])

    def begin_iteration(self, command: Command, index: int, envelope: Envelope) -> asyncio.Future[set[int]]:
        """Publishes the result of an iteration as one chunk. It is in the log when the future is done.

        Chunks reach the log in the order of the calls, and after the events that were posted before.
        """
        return self._begin(command, [self._result(command, index, envelope, more=True)])

    async def room(self, key: StreamKey) -> None:
        """Returns when there is room for another chunk."""
        for stream in tuple(self._open.get(key, ())):
            while not stream.has_room:
                await stream.changed()

    async def skip(self, command: Command, index: int) -> None:
        """Records that a step makes nothing of a chunk that it consumes, so that no other step waits for it."""
        meta = {"chunk_index": index, "has_more": True, "row_count": 0}
        await self._publish(command, [self._events.partial(command, {"status": LEFT_OUT}, meta)])

    async def iterations(self, key: StreamKey) -> dict[int, int | None]:
        """Returns, by number of each chunk in the log, the iteration whose result it is."""
        rows = await self._pool.fetch(CHUNK_ITERATIONS, *_parameters(key))
        return {row["chunk_index"]: row["current_index"] for row in rows}

    async def items(self, stream: ChunkStream, start: int, stop: int) -> list[dict[str, Any]]:
        """Returns the chunks of ``start <= number < stop`` as items of the loops that consume them."""
        recent = stream.recent(start, stop)
        if recent is not None:
            return recent
        rows = await self._pool.fetch(CHUNKS, *_parameters(stream.key), start, stop)
        return [_item(row) for row in rows]

    def _result(self, command: Command, index: int, envelope: Envelope, *, more: bool) -> Event:
        result: Envelope = {key: envelope[key] for key in ("status", "data", "ref", "error") if key in envelope}
        meta = {"chunk_index": index, "has_more": more, "row_count": row_count(result)}
        return self._events.partial(command, result, meta)

    async def _publish(self, command: Command, events: Sequence[Event]) -> None:
        """Writes chunks to the log at once, and returns when there is room for another one."""
        writing = self._begin(command, events)
        self._buffer.hurry()
        await writing
        await self.room(command.visit_key)

    def _begin(self, command: Command, events: Sequence[Event]) -> asyncio.Future[set[int]]:
        streams = tuple(self._open.get(command.visit_key, ()))
        for stream in streams:
            stream.begin(len(events))
        urgent = not streams or any(stream.waiting for stream in streams)
        writing = self._buffer.begin(events, urgent=urgent)
        if streams:
            writing.add_done_callback(partial(_written, streams, events))
        return writing


def _written(streams: Sequence[ChunkStream], events: Sequence[Event], writing: asyncio.Future[set[int]]) -> None:
    """Counts chunks once they are in the log. Chunks that the log had before may differ: those are read from it."""
    failed = writing.cancelled() or writing.exception() is not None
    new = () if failed else [event for event in events if event.event_id in writing.result()]
    items = {event.meta["chunk_index"]: _item({**event.meta, "result": event.result}) for event in new}
    for stream in streams:
        stream.written(len(events), items)
        for event in () if failed else events:
            stream.add(event.meta["chunk_index"])


def _parameters(key: StreamKey) -> tuple[int, str, str]:
    execution_id, step, visit = key
    return execution_id, step, str(visit)


def _call_digest(call: ToolCall) -> str:
    """Identifies a call among others of its task, by its number and its rendered arguments."""
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
