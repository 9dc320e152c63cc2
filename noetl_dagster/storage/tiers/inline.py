"""Tiers without a store: ``memory`` (this process) and ``eventlog`` (inside the reference)."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

from noetl_dagster.storage.tiers.base import Bytes, TierTooSmallError, WholeValues

MEMORY_LIMIT = 256 * 1024 * 1024
"""Bytes that the memory tier of a process holds; later results go to the disk tier."""


class MemoryTier(WholeValues):
    """Objects in the memory of this process, invisible to other processes."""

    _objects: dict[str, bytes] = {}  # noqa: RUF012 - shared on purpose by every store of the process
    _size = 0

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return f"memory://{key}"

    async def ready(self) -> None:
        """Returns at once."""

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

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        return uri in MemoryTier._objects

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        MemoryTier._size -= len(MemoryTier._objects.pop(uri, b""))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        start = self.uri(prefix)
        yield [uri.removeprefix(self.uri("")) for uri in MemoryTier._objects if uri.startswith(start)]

    async def close(self) -> None:
        """Has nothing to release."""


class EventLogTier(WholeValues):
    """Objects inside their own URI (RFC 2397), and so inside the row and the event that carry it."""

    PREFIX = "data:application/octet-stream;base64,"

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return self.PREFIX

    async def ready(self) -> None:
        """Returns at once."""

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        return self.PREFIX + base64.b64encode(data).decode("ascii")

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        return base64.b64decode(uri.removeprefix(self.PREFIX))

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        return uri.startswith(self.PREFIX)

    async def delete(self, uri: str) -> None:
        """Has nothing to remove."""

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        yield []

    async def close(self) -> None:
        """Has nothing to release."""
