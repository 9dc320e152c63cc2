"""Chunks as the log keeps them: ``call.partial`` events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_dagster.events.buffer import EventBuffer
from noetl_dagster.events.envelopes import OK, Envelope, from_result
from noetl_dagster.events.queries import CHUNK_ITERATIONS, CHUNKS, CHUNKS_TOLD
from noetl_dagster.playbook.templates.chunks import row_count
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import Chunk, ToolCall
from noetl_dagster.worker.command import Command, CommandEvents
from noetl_dagster.worker.streams.stream import Stream

Place = tuple[int, str, int]
"""Execution, step and visit: what has one stream of chunks."""


@dataclass(slots=True)
class _Running:
    """A command whose tool may tell of chunks: in its last task, whose result is the step's.

    Attributes:
        told_by: the number of the call that has told of its last chunk. A policy may have the task called again.
    """

    command: Command
    task: str
    told_by: int | None = None


class Streams:
    """The chunks that steps of this process make and take. The toolbox's ``ChunkLog``.

    Chunks of a visit are numbered from 0, whatever attempt of its command made them, and each number is in the log
    once: a producer that is run again goes on, or tells of the same chunks in vain.
    """

    def __init__(self, buffer: EventBuffer, events: CommandEvents, pool: asyncpg.Pool) -> None:
        self._buffer = buffer
        self._events = events
        self._pool = pool
        self._open: dict[Place, Stream] = {}
        self._running: dict[str, _Running] = {}

    async def open(self, place: Place, takers: Mapping[str, int]) -> Stream:
        """The stream of a visit, whose chunks are taken in this process from now on; see :class:`Stream`."""
        stream = self._open[place] = Stream(takers)
        for number in await self.iterations(place):
            stream.tell(number)
        return stream

    def close(self, place: Place) -> None:
        """Nobody takes chunks of a visit here any more."""
        self._open.pop(place, None)

    def of(self, place: Place) -> Stream | None:
        """The stream of a visit whose chunks are taken in this process."""
        return self._open.get(place)

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
        running = self._of_call(call)
        if running is None:
            return ()
        rows = await self._pool.fetch(CHUNKS_TOLD, *_named(place_of(running.command)))
        return [_chunk(row) for row in rows]

    async def tell(self, call: ToolCall, chunk: Chunk) -> None:
        running = self._of_call(call)
        if running is None:
            return
        envelope: Envelope = {"status": OK, "ref": chunk.ref}
        meta = {"chunk_index": chunk.index, "has_more": chunk.more, "row_count": chunk.ref.rows}
        await self._tell(running.command, envelope, meta, {"position": chunk.position})
        if not chunk.more:
            running.told_by = call.number

    def _of_call(self, call: ToolCall) -> _Running | None:
        running = self._running.get(call.command_id)
        if running is None or running.task != call.task.name:
            return None
        return running if running.told_by in (None, call.number) else None

    # -- what the engine sees ------------------------------------------------------------------------

    async def tell_result(self, command: Command, index: int, envelope: Envelope, *, more: bool) -> None:
        """Tells of a result as one chunk: of an iteration, or of a tool that gives no others."""
        kept: Envelope = {key: envelope[key] for key in ("status", "data", "ref", "error") if key in envelope}
        meta = {"chunk_index": index, "has_more": more, "row_count": row_count(kept)}
        await self._tell(command, kept, meta)

    async def iterations(self, place: Place) -> dict[int, int | None]:
        """By number of each chunk of a visit that is in the log, the iteration whose result it is."""
        rows = await self._pool.fetch(CHUNK_ITERATIONS, *_named(place))
        return {row["chunk_index"]: row["current_index"] for row in rows}

    async def items(self, place: Place, start: int, stop: int) -> list[dict[str, Any]]:
        """The chunks of ``start <= number < stop`` as the steps get them that take them."""
        rows = await self._pool.fetch(CHUNKS, *_named(place), start, stop)
        return [_item(row) for row in rows]

    async def _tell(
        self,
        command: Command,
        envelope: Envelope,
        meta: dict[str, Any],
        context: dict[str, Any] | None = None,
    ) -> None:
        """Writes the event, and returns when there is room for another chunk."""
        await self._buffer.append([self._events.partial(command, envelope, meta, context)])
        place = place_of(command)
        stream = self._open.get(place)
        if stream is None:
            return
        stream.tell(meta["chunk_index"])
        while not stream.has_room:
            await stream.changed()


def place_of(command: Command) -> Place:
    """What has the stream that a command's chunks are in."""
    return command.execution_id, command.step, command.visit


def _named(place: Place) -> tuple[int, str, str]:
    execution_id, step, visit = place
    return execution_id, step, str(visit)


def _chunk(row: Any) -> Chunk:
    ref = ResultRef.model_validate(row["result"]["reference"])
    return Chunk(row["chunk_index"], ref, row["context"]["position"], row["has_more"])


def _item(row: Any) -> dict[str, Any]:
    item = {key: row[key] for key in ("chunk_index", "row_count", "has_more")}
    envelope = from_result(row["result"])
    reference = envelope.get("ref")
    if reference is not None:
        return item | {"ref": reference.model_dump(mode="json", exclude_defaults=True)}
    if envelope["status"] != OK:
        return item | {"error": envelope.get("error")}
    return item | {"data": envelope.get("data")}
