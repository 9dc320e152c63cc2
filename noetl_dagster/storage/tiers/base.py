"""The contract of tiers, and the two without a store: ``memory`` (this process) and ``eventlog`` (in the reference).

Tiers move bytes and know nothing of references, JSON or checksums.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from noetl_dagster.errors import StorageError

Bytes = bytes | memoryview

CHUNK = 4 * 1024 * 1024
"""Bytes per chunk of a stream: large enough for full speed, small enough that a few fit any worker."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket, as its store describes it.

    Attributes:
        bytes: its size.
        etag: changes with the bytes; without quotes. Of a file, its time in nanoseconds.
    """

    key: str
    bytes: int
    etag: str
    modified: datetime


class Bucket(ABC):
    """A bucket without an event loop: for Spark, IO managers and tools. Each client adds reading and writing.

    Methods raise ``FileNotFoundError`` when an object or the bucket is missing, else the client's own errors.
    """

    @abstractmethod
    def find(self, key: str) -> StoredObject:
        """Returns what the store knows of an object."""

    @abstractmethod
    def objects(self, prefix: str) -> Iterator[list[StoredObject]]:
        """Yields pages of the objects whose keys begin with a prefix; a page may be empty."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of all objects below a prefix by their keys, or those of the object of that name."""
        name = prefix.rstrip("/")
        folder = f"{name}/" if name else ""
        below = {entry.key: entry.bytes for page in self.objects(folder) for entry in page}
        if not below and name == prefix:
            with suppress(FileNotFoundError):
                return {name: self.find(name).bytes}
        return below


class TierUnavailableError(StorageError):
    """The store behind a tier does not answer or cannot take this object; another tier may."""


class TierTooSmallError(TierUnavailableError):
    """The store works, but this object is too large for it."""


class Tier(ABC):
    """One kind of storage. A tier's URIs are its own and are all that it needs to find an object again.

    All methods raise :class:`TierUnavailableError` when the store does not answer, ``KeyError`` when an object is
    missing, and :class:`~noetl_dagster.errors.StorageError` for refusals (credentials, paths). ``put_stream``,
    ``stream`` and ``size`` are those of stores that read and write values only as a whole.

    Attributes:
        root: the URI of all objects, to which their keys are appended.
        made_bucket: this object has created its bucket.
    """

    root: str
    made_bucket = False

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return self.root + key

    def key(self, uri: str) -> str:
        """Returns the key of the object at a URI; raises ``StorageError`` for another store's."""
        if not uri.startswith(self.root):
            raise StorageError(f"{uri} is not in {self.root}")
        return uri.removeprefix(self.root)

    async def ready(self) -> None:  # noqa: B027 - some tiers have no store that could be away
        """Returns when the store answers. Callers ask before they consume a stream that cannot be repeated."""

    @abstractmethod
    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object, which becomes visible as a whole or not at all. Returns its URI."""

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object, in constant memory if the store can; if ``chunks`` raises, nothing is left."""
        return await self.put(key, b"".join([bytes(chunk) async for chunk in chunks]))

    @abstractmethod
    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory if the store can."""
        yield await self.get(uri)

    async def size(self, uri: str) -> int:
        """Returns the number of bytes of an object."""
        return len(await self.get(uri))

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        try:
            await self.size(uri)
        except KeyError:
            return False
        return True

    @abstractmethod
    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error. A URI ending in ``/`` is a folder."""

    @abstractmethod
    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix that ends in ``/``, half-written files included."""

    async def close(self) -> None:  # noqa: B027 - most tiers have none
        """Releases connections."""


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
