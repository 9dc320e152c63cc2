"""A log of chunks in memory, for tools whose results are made chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from noetl_dagster.settings import Settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import Chunk, Removal, ToolCall, ToolContext


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


class NoLog:
    """The log of a process whose commands end with their calls, and of whose chunks no step takes any."""

    def __init__(self) -> None:
        self._removals: list[Removal] = []

    def after(self, call: ToolCall, removal: Removal) -> None:
        self._removals.append(removal)

    async def over(self, call: ToolCall) -> bool:
        return False

    async def end(self) -> None:
        """Removes what the calls have left."""
        removals, self._removals = self._removals, []
        for removal in removals:
            await removal()

    def wanted(self, call: ToolCall) -> bool:
        return False

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        return ()

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        pass

    def toolbox(
        self, settings: Settings, results: ResultStore, credentials: Credentials, clients: Clients, spark: Any
    ) -> ToolContext:
        """A toolbox over this log."""
        return ToolContext(settings, results, credentials, clients, spark, self.after, self.over, self)


class Killed(Exception):
    """Stands for the end of the process: no tool catches it."""


def rows_of(value: Any) -> Any:
    return value if isinstance(value, list) else value.to_pylist()
