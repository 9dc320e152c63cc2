"""From generators in other threads to the store: they go on as fast as their chunks are stored."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from noetl_dagster.tools.base import ToolResult
from noetl_dagster.tools.chunks.gather import Gathered
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.python.code import CodeFailure, Program
from noetl_dagster.tools.python.yields import async_chunks_of, chunks_of


class Stream:
    """What one generator yields, on its way into the result of a call.

    While a chunk is being stored the generator makes the next one, and then waits: two are in memory at most.

    Args:
        seeks: the generator yields positions, and is given one.
    """

    def __init__(self, result: ChunkedResult, *, seeks: bool) -> None:
        self._chunks = result
        self._seeks = seeks
        self._loop = asyncio.get_running_loop()
        self._storing: concurrent.futures.Future[bool] | None = None
        self._closed = False

    async def result(self) -> ToolResult:
        return await self._chunks.result()

    def take(self, values: Generator[Any, Any, Any], program: Program) -> None:
        """Takes all that a generator yields, in its thread.

        Raises:
            CodeFailure: the generator raised.
            ToolError, StorageError: a chunk could not be stored.
        """
        with closing(chunks_of(values, program, self._chunks.chunk_bytes, seeks=self._seeks)) as chunks:
            try:
                for chunk in chunks:
                    if not self._is_stored():
                        return
                    self._store(chunk)
            except CodeFailure:
                self._is_stored()  # what came before it is kept
                raise
        self._is_stored()

    async def take_async(self, values: AsyncGenerator[Any, Any], program: Program) -> None:
        """The same of an async generator, in its event loop."""
        found = async_chunks_of(values, program, self._chunks.chunk_bytes, seeks=self._seeks)
        async with aclosing(found) as chunks:
            async for chunk in chunks:
                if not await asyncio.wrap_future(self._store(chunk)):
                    return

    def close(self) -> None:
        """Ends the storing, and with it the waiting, of a call that is over."""
        self._closed = True
        if self._storing is not None:
            self._storing.cancel()

    def _store(self, chunk: Gathered) -> concurrent.futures.Future[bool]:
        self._storing = asyncio.run_coroutine_threadsafe(self._put(chunk), self._loop)
        return self._storing

    def _is_stored(self) -> bool:
        """Waits for the latest chunk; False when the rest is stored already."""
        return self._storing is None or self._storing.result()

    async def _put(self, chunk: Gathered) -> bool:
        if self._closed:  # meanwhile
            raise asyncio.CancelledError
        return await self._chunks.put(chunk)
