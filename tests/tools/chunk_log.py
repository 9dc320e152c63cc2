"""A log of chunks in memory, for tools whose results are made chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from noetl_dagster.tools.base import Chunk, ToolCall, ToolContext


class ListLog:
    """What calls have told, in order.

    Attributes:
        chunks: of the one call that is tested.
        takes: whether a step takes the chunks.
        room: how many further ones those who take them have room for; None is any number.
        stops_after: the process "is killed" when it tells of the chunk with this index, before it is written.
        stops_with: the same when it is written.
    """

    def __init__(self, *, wanted: bool = False, room: int | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.room = room
        self.stops_after: int | None = None
        self.stops_with: int | None = None
        self.takes = wanted
        self._changed = asyncio.Condition()

    def wanted(self, call: ToolCall) -> bool:
        return self.takes

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        return tuple(self.chunks)

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        for chunk in chunks:
            await self._tell(chunk)

    async def _tell(self, chunk: Chunk) -> None:
        if chunk.index == self.stops_after:
            raise Killed
        async with self._changed:
            assert chunk.index == len(self.chunks)
            self.chunks.append(chunk)
            self._changed.notify_all()
            if chunk.index == self.stops_with:
                raise Killed
            if self.room is not None:
                await self._changed.wait_for(lambda: self.room is None or len(self.chunks) <= self.room)

    async def make_room(self, room: int | None) -> None:
        async with self._changed:
            self.room = room
            self._changed.notify_all()

    async def rows(self, box: ToolContext) -> list[Any]:
        """The rows of each chunk."""
        return [rows_of(await box.results.get(chunk.ref)) for chunk in self.chunks]


class Killed(Exception):
    """Stands for the end of the process: no tool catches it."""


def rows_of(value: Any) -> Any:
    return value if isinstance(value, list) else value.to_pylist()
