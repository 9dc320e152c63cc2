"""Tiers without a store: ``memory`` (this process) and ``eventlog`` (inside the reference)."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

from noetl_dagster.storage.tiers.base import Bytes, Tier, TierTooSmallError

MEMORY_LIMIT = 256 * 1024 * 1024
"""Bytes that the memory tier of a process holds; later results go to the disk tier."""


class MemoryTier(Tier):
    """Objects in the memory of this process, invisible to other processes."""

    root = "memory://"
    _objects: dict[str, bytes] = {}  # noqa: RUF012 - shared on purpose by every store of the process
    _size = 0

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        uri = self.uri(key)
        await self.delete(uri)
        if MemoryTier._size + len(data) > MEMORY_LIMIT:
            raise TierTooSmallError(f"memory tier: more than {MEMORY_LIMIT} bytes in this process")
        MemoryTier._objects[uri] = bytes(data)
        MemoryTier._size += len(data)
        return uri

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        return MemoryTier._objects[uri]

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        MemoryTier._size -= len(MemoryTier._objects.pop(uri, b""))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        keys = (uri.removeprefix(self.root) for uri in MemoryTier._objects)
        yield [key for key in keys if key.startswith(prefix)]


class EventLogTier(Tier):
    """Objects inside their own URI (RFC 2397), and so inside the row and the event that carry it."""

    root = "data:application/octet-stream;base64,"

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        return self.root + base64.b64encode(data).decode("ascii")

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        return base64.b64decode(uri.removeprefix(self.root))

    async def delete(self, uri: str) -> None:
        """Has nothing to remove."""

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        yield []
