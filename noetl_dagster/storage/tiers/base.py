"""What every tier can do. A tier moves bytes; it knows nothing of references, JSON or checksums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Protocol, runtime_checkable

from noetl_dagster.errors import StorageError

Bytes = bytes | memoryview

CHUNK = 4 * 1024 * 1024
"""Bytes per chunk of a stream: large enough for full speed, small enough that a few fit any worker."""


class TierUnavailableError(StorageError):
    """The store behind a tier does not answer or cannot take this object; another tier may."""


class TierTooSmallError(TierUnavailableError):
    """The store is well, but this object is too large for it."""


class Tier(Protocol):
    """One kind of storage. URIs are the tier's own and are all it needs to find an object again.

    All methods raise :class:`TierUnavailableError` when the store does not answer, ``KeyError`` when an
    object is not there, and :class:`~noetl_dagster.errors.StorageError` for refusals (credentials, paths).
    """

    def uri(self, key: str) -> str:
        """The URI that an object stored under ``key`` has."""
        ...

    async def ready(self) -> None:
        """Returns when the store answers: asked before a stream is consumed, which cannot be repeated."""
        ...

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object; it is visible whole or not at all. Returns its URI."""
        ...

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        ...

    async def get(self, uri: str) -> Bytes: ...

    def stream(self, uri: str) -> AsyncIterator[Bytes]: ...

    async def exists(self, uri: str) -> bool: ...

    async def delete(self, uri: str) -> None:
        """Removes an object; one that is not there is no error. A URI ending in ``/`` is a folder."""
        ...

    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Keys of the objects below a prefix that ends in ``/``, in pages; files half written are among them."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TakesUploads(Protocol):
    """A tier whose large objects come in parts, which stay in the store when nobody completes them."""

    async def abort_uploads(self, prefix: str, before: datetime) -> int:
        """Removes the parts of uploads below a prefix that began before a moment. Returns how many uploads."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A tier that makes its bucket where that is missing."""

    @property
    def made_bucket(self) -> bool:
        """Whether this tier object has done so."""
        ...


class WholeValues(ABC):
    """What tiers have in common whose stores take and give values only whole."""

    @abstractmethod
    async def put(self, key: str, data: Bytes) -> str: ...

    @abstractmethod
    async def get(self, uri: str) -> Bytes: ...

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        return await self.put(key, b"".join([bytes(chunk) async for chunk in chunks]))

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        yield await self.get(uri)

    async def exists(self, uri: str) -> bool:
        try:
            await self.get(uri)
        except KeyError:
            return False
        return True
