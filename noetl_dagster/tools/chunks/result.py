"""The result of a call that gives its rows as they come: a value when it turns out small, else chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkWriter


class ChunkedResult:
    """Takes gathered rows and gives one result of them.

    Attributes:
        most_bytes: the size that a source cuts for which cuts its rows itself.
        chunk_bytes: the size to gather for; 0 where a step takes every addition as a chunk of its own.
        position: where a producer that can seek goes on; None at the beginning, and for all others.
        wanted: a step takes the chunks as they come, so that a small result is one too.
    """

    def __init__(self, call: ToolCall, box: Toolbox) -> None:
        self._call = call
        self._box = box
        self._writer: ChunkWriter | None = None
        self._rest: Any = []
        self.wanted = box.chunks is not None and box.chunks.wanted(call)
        self.most_bytes = box.settings.chunk_bytes
        self.chunk_bytes = 0 if self.wanted else self.most_bytes
        self.position: Any = None

    async def seek(self) -> bool:
        """Asks where an earlier run of the call stopped; False when there is nothing left to do."""
        writer = await ChunkWriter.open(self._call, self._box, seeks=True)
        if writer.stored and writer.position is None and not writer.is_whole:
            # it gave no positions: what is stored is compared
            writer = await ChunkWriter.open(self._call, self._box)
        self.position = writer.position
        if not writer.stored:
            return True  # a result that turns out small has no writer
        self._writer = writer
        return not writer.is_whole

    async def begin_again(self) -> None:
        """Of a producer that cannot go on at ``position`` after all: what is stored is compared."""
        self.position = None
        self._writer = await ChunkWriter.open(self._call, self._box)

    async def put(self, chunk: Gathered) -> bool:
        """Stores a chunk, or keeps it where it is all; False when an earlier run has stored all that there is.

        Raises:
            ToolError: what was stored before is not what comes now.
            StorageError: no tier took it.
        """
        if self._writer is None:
            if not (chunk.full or self.wanted):
                self._rest = chunk.rows
                return True
            self._writer = await ChunkWriter.open(self._call, self._box)
        if self._writer.is_whole:
            return False
        await self._writer.put(chunk.rows, chunk.position)
        return True

    async def result(
        self, fields: Mapping[str, Any] | None = None, details: Mapping[str, Any] | None = None
    ) -> ToolResult:
        """All rows, as a value when they were less than a chunk, else by reference.

        Args:
            fields: the result is a mapping of them and the rows as its ``data``; else it is the rows, a list or table.
            details: further parts of the envelope.
        """
        if self._writer is None and self.wanted and fields is not None:
            await self.put(Gathered([], full=False))  # a chunk of its own, so that the fields are no row
        if self._writer is not None:
            return ToolResult(ref=await self._writer.finish(fields, ("data",)), details=dict(details or {}))
        data = self._rest if fields is None else {**fields, "data": self._rest}
        return ToolResult(data=data, details=dict(details or {}))
