"""Checksums of results, computed while their bytes are moved."""

from __future__ import annotations

import asyncio
import hashlib

from noetl_dagster.storage.tiers.base import Bytes

THREAD_ABOVE = 1024 * 1024
"""Bytes from which hashing is worth a separate thread."""


def digest_of(data: Bytes) -> str:
    """Returns the sha256 of bytes, as hex digits."""
    return hashlib.sha256(data).hexdigest()


class RunningDigest:
    """A sha256 that is one chunk behind: each chunk is hashed in a thread while the next one is moved."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._running: asyncio.Future[None] | None = None

    async def add(self, chunk: Bytes) -> None:
        """Adds a chunk; waits only for the one before it."""
        await self._settle()
        if len(chunk) < THREAD_ABOVE:
            self._digest.update(chunk)
        else:
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(None, self._digest.update, chunk)

    async def hexdigest(self) -> str:
        """Returns the digest of all chunks."""
        await self._settle()
        return self._digest.hexdigest()

    async def _settle(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running
