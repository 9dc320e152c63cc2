"""Tiers without a store behind them: ``memory`` (this process) and ``eventlog`` (inside the reference)."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

from noetl_dagster.storage.tiers.base import Bytes, TierTooSmallError, WholeValues

MEMORY_LIMIT = 256 * 1024 * 1024
"""Bytes the memory tier of a process holds; results beyond it go to the disk tier."""


class MemoryTier(WholeValues):
    """Objects of this process. Other processes do not see them, and they end with it."""

    _objects: dict[str, bytes] = {}  # noqa: RUF012 - shared on purpose by every store of the process
    _size = 0

    def uri(self, key: str) -> str:
        return f"memory://{key}"

    async def ready(self) -> None:
        return None

    async def put(self, key: str, data: Bytes) -> str:
        uri = self.uri(key)
        await self.delete(uri)
        if MemoryTier._size + len(data) > MEMORY_LIMIT:
            raise TierTooSmallError(f"memory tier: more than {MEMORY_LIMIT} bytes in this process")
        MemoryTier._objects[uri] = bytes(data)
        MemoryTier._size += len(data)
        return uri

    async def get(self, uri: str) -> Bytes:
        return MemoryTier._objects[uri]

    async def exists(self, uri: str) -> bool:
        return uri in MemoryTier._objects

    async def delete(self, uri: str) -> None:
        MemoryTier._size -= len(MemoryTier._objects.pop(uri, b""))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        start = self.uri(prefix)
        yield [uri.removeprefix(self.uri("")) for uri in MemoryTier._objects if uri.startswith(start)]

    async def close(self) -> None:
        return None


class EventLogTier(WholeValues):
    """The bytes are in the URI itself (RFC 2397), and so in the row and the event that carry it."""

    PREFIX = "data:application/octet-stream;base64,"

    def uri(self, key: str) -> str:
        return self.PREFIX

    async def ready(self) -> None:
        return None

    async def put(self, key: str, data: Bytes) -> str:
        return self.PREFIX + base64.b64encode(data).decode("ascii")

    async def get(self, uri: str) -> Bytes:
        return base64.b64decode(uri.removeprefix(self.PREFIX))

    async def exists(self, uri: str) -> bool:
        return uri.startswith(self.PREFIX)

    async def delete(self, uri: str) -> None:
        return None

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        yield []

    async def close(self) -> None:
        return None
