"""Fetches results by reference and verifies them, whole or in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from noetl_dagster.errors import IntegrityError, ReferenceNotAvailableError, StorageError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, manifests
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.checksum import THREAD_ABOVE, RunningDigest, digest_of
from noetl_dagster.storage.codec import Compression
from noetl_dagster.storage.manifests import Batch
from noetl_dagster.storage.placement import KEY_ROOT, Placement, canonical
from noetl_dagster.storage.tiers.base import Bytes

_LOOKS_IN_FLIGHT = 32


class ResultReader:
    """Fetches results by reference or by name; the base class of the store."""

    def __init__(self, settings: Settings, placement: Placement, catalog: RefCatalog) -> None:
        self.settings = settings
        self._placement = placement
        self._catalog = catalog

    async def find(self, what: str | tuple[int, str, str]) -> ResultRef:
        """Returns the reference of a logical name, or the latest of ``(execution id, step, name)``.

        Raises:
            ReferenceNotAvailableError: there is none, or it has expired.
        """
        ref = await (self._catalog.by_ref(what) if isinstance(what, str) else self._catalog.by_name(*what))
        return _unexpired(ref)

    async def get(self, ref: ResultRef | str) -> Any:
        """Returns the value of a reference: an object, bytes, text, an Arrow table, or a manifest's combined parts.

        Raises:
            ReferenceNotAvailableError: nothing is stored there.
            IntegrityError: the bytes differ from those that were stored.
        """
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            return await manifests.assemble(self, ref)
        if ref.kind is RefKind.DATASET:
            return await asyncio.to_thread(manifests.read_dataset, self.settings, ref)
        data = await self._read(ref)
        if ref.compression == "none" and ref.content_type == codec.BINARY:
            return data if isinstance(data, bytes) else bytes(data)
        return codec.decode(data, ref.content_type, ref.compression)

    async def get_bytes(self, ref: ResultRef | str) -> bytes:
        """Returns the bytes of :meth:`stream`, verified."""
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            return b"".join([data async for data in manifests.content(self, ref)])
        data = codec.decompress(await self._read(ref), Compression(ref.compression))
        return data if isinstance(data, bytes) else bytes(data)

    async def lines(self, ref: ResultRef) -> AsyncIterator[list[Any]]:
        """Yields the rows of an object of JSON lines in batches: parsed rows are several times larger."""
        for rows in codec.rows_of_lines(
            codec.decompress(await self._read(ref), Compression(ref.compression))
        ):
            yield rows

    async def stream(self, ref: ResultRef | str) -> AsyncIterator[Bytes]:
        """Yields the decompressed bytes of an object, or the encoded value of a manifest, in constant memory.

        Raises:
            IntegrityError: after the last chunk, if the bytes differ from those that were stored.
        """
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            async for data in manifests.content(self, ref):
                yield data
            return
        async for chunk in codec.decompress_stream(self._verified_chunks(ref), Compression(ref.compression)):
            yield chunk

    async def content_type(self, ref: ResultRef | str) -> str:
        """Returns the content type of the bytes of :meth:`stream`."""
        ref = await self._resolve(ref)
        return await manifests.content_type(self, ref) if ref.kind is RefKind.MANIFEST else ref.content_type

    async def parts(
        self, ref: ResultRef | str, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[ResultRef]:
        """Yields the references in a manifest, in order; any other reference is its own only part.

        Args:
            start, stop: half-open range of a manifest's parts.
        """
        ref = await self._resolve(ref)
        if ref.kind is not RefKind.MANIFEST:
            yield ref
            return
        if ref.extra.get("only_first"):
            stop = 1
        async for part in self._catalog.parts(ref.ref_id, start, stop):
            yield part

    async def items(self, ref: ResultRef | str) -> AsyncIterator[Any]:
        """Yields the items of a result one by one, holding one part at a time.

        Items are the elements of a list, the rows of a table as mappings, or those that a manifest's strategy defines.
        """
        async for batch in self.batches(ref):
            for item in batch if isinstance(batch, list) else batch.to_pylist():
                yield item

    async def batches(self, ref: ResultRef | str) -> AsyncIterator[Batch]:
        """Yields the items of a result in batches, holding one part at most: lists, or Arrow batches of a table."""
        async for batch in manifests.batches(self, await self._resolve(ref)):
            yield batch

    async def missing(self, execution_id: int | None = None) -> AsyncIterator[ResultRef]:
        """Yields recorded results whose bytes are missing in the configured tiers, oldest first.

        This checks presence only: existing bytes may still be damaged, which readers detect.

        Args:
            execution_id: None looks at every execution.

        Raises:
            StorageError: a store does not answer, so its content is unknown.
        """
        # rows may use an older name of disk
        tiers = [one for one in StoreTier if canonical(one) in self._placement.lasting()]
        limit = asyncio.Semaphore(_LOOKS_IN_FLIGHT)

        async def there(ref: ResultRef) -> bool:
            async with limit:
                return await self._is_there(ref)

        async for refs in self._catalog.stored(tiers, execution_id, datetime.now(UTC)):
            for ref, found in zip(refs, await asyncio.gather(*map(there, refs)), strict=True):
                if not found:
                    yield ref

    async def _is_there(self, ref: ResultRef) -> bool:
        tier, uri = self._placement.tier(ref.store_tier), ref.physical_uri
        if not uri.endswith("/"):
            return await tier.exists(uri)
        root = tier.uri(KEY_ROOT)
        if not uri.startswith(root):  # a folder that another program wrote and named
            return True
        async for keys in tier.keys(KEY_ROOT + uri.removeprefix(root)):
            if keys:
                return True
        return False

    async def _resolve(self, ref: ResultRef | str, *, expired_too: bool = False) -> ResultRef:
        found = await self._catalog.by_ref(ref) if isinstance(ref, str) else ref
        return found if expired_too else _unexpired(found)

    async def _read(self, ref: ResultRef) -> Bytes:
        """Returns the stored bytes, verified. Large ones are hashed while they arrive."""
        _require_object(ref)
        if ref.bytes_size >= THREAD_ABOVE:
            digest = RunningDigest()
            whole, size = bytearray(ref.bytes_size), 0
            async for chunk in self._chunks(ref, digest):
                whole[size : size + len(chunk)] = chunk
                size += len(chunk)
            del whole[size:]
            _verify(ref, await digest.hexdigest())
            return memoryview(whole)
        try:
            data = await self._placement.tier(ref.store_tier).get(ref.physical_uri)
        except KeyError as error:
            raise _missing(ref) from error
        _verify(ref, digest_of(data))
        return data

    async def _verified_chunks(self, ref: ResultRef) -> AsyncIterator[Bytes]:
        _require_object(ref)
        digest = RunningDigest()
        async for chunk in self._chunks(ref, digest):
            yield chunk
        _verify(ref, await digest.hexdigest())

    async def _chunks(self, ref: ResultRef, digest: RunningDigest) -> AsyncIterator[Bytes]:
        try:
            async for chunk in self._placement.tier(ref.store_tier).stream(ref.physical_uri):
                await digest.add(chunk)
                yield chunk
        except KeyError as error:
            raise _missing(ref) from error


def _require_object(ref: ResultRef) -> None:
    if ref.kind is not RefKind.OBJECT:
        raise StorageError(f"{ref.ref} is a {ref.kind.value}, not one object; read its items or parts")


def _verify(ref: ResultRef, digest: str) -> None:
    if ref.sha256 is not None and digest != ref.sha256:
        raise IntegrityError(
            f"{ref.ref}: the bytes at {ref.physical_uri[:200]} were changed or damaged (sha256 {digest}, "
            f"stored as {ref.sha256}); run the step again"
        )


def _missing(ref: ResultRef) -> ReferenceNotAvailableError:
    return ReferenceNotAvailableError(
        f"{ref.ref}: nothing is at {ref.physical_uri[:200]} ({ref.store_tier.value} tier); "
        "it expired, was deleted, or belongs to another machine"
    )


def _unexpired(ref: ResultRef) -> ResultRef:
    if ref.expires_at is not None and ref.expires_at <= datetime.now(UTC):
        raise ReferenceNotAvailableError(f"{ref.ref} expired at {ref.expires_at}; run the step again")
    return ref
