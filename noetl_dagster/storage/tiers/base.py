"""The contracts of tiers and buckets. They move bytes and know nothing of references, JSON or checksums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import BinaryIO, Protocol, runtime_checkable

from noetl_dagster.errors import StorageError

Bytes = bytes | memoryview

CHUNK = 4 * 1024 * 1024
"""Bytes per chunk of a stream: large enough for full speed, small enough that a few fit any worker."""


class TierUnavailableError(StorageError):
    """The store behind a tier does not answer or cannot take this object; another tier may."""


class TierTooSmallError(TierUnavailableError):
    """The store works, but this object is too large for it."""


class Tier(Protocol):
    """One kind of storage. A tier's URIs are its own and are all that it needs to find an object again.

    All methods raise :class:`TierUnavailableError` when the store does not answer, ``KeyError`` when an
    object is missing, and :class:`~noetl_dagster.errors.StorageError` for refusals (credentials, paths).
    """

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        ...

    async def ready(self) -> None:
        """Returns when the store answers. Callers ask before they consume a stream that cannot be repeated."""
        ...

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object, which becomes visible as a whole or not at all. Returns its URI."""
        ...

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        ...

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        ...

    def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory."""
        ...

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        ...

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error. A URI ending in ``/`` is a folder."""
        ...

    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix that ends in ``/``, half-written files included."""
        ...

    async def close(self) -> None:
        """Releases connections."""
        ...


@runtime_checkable
class TakesUploads(Protocol):
    """A tier that uploads large objects in parts; the parts of an unfinished upload stay in the store."""

    async def abort_uploads(self, prefix: str, before: datetime) -> int:
        """Removes the parts of uploads below a prefix that began before a moment. Returns the number of uploads."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A tier that creates its bucket if it is missing."""

    @property
    def made_bucket(self) -> bool:
        """Reports whether this tier object has created the bucket."""
        ...


class Bucket(Protocol):
    """One bucket of an object store, without an event loop: for Spark, IO managers and compute logs.

    Methods raise ``FileNotFoundError`` when an object or the bucket is missing, else the client's own errors.
    """

    def read(self, key: str) -> bytes:
        """Returns the bytes of an object."""
        ...

    def open(self, key: str) -> BinaryIO:
        """Returns a reader that fetches an object while it is read."""
        ...

    def write(self, key: str, file: BinaryIO, size: int, content_type: str | None = None) -> None:
        """Stores the next ``size`` bytes of a file, in constant memory if they are many."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of all objects below a prefix by their keys, or those of the object of that name."""
        ...

    def exists(self, key: str) -> bool:
        """Reports whether an object is stored under a key."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""
        ...


class WholeValues(ABC):
    """The common part of tiers whose stores read and write values only as a whole."""

    @abstractmethod
    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""

    @abstractmethod
    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Collects a stream and stores it."""
        return await self.put(key, b"".join([bytes(chunk) async for chunk in chunks]))

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the whole object as one chunk."""
        yield await self.get(uri)

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        try:
            await self.get(uri)
        except KeyError:
            return False
        return True
