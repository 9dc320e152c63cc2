"""The result store: values in, references out, and back.

Large values never travel through events. They are stored here, in a tier chosen by size and settings, and events
carry a :class:`~noetl_dagster.result_ref.ResultRef` instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.process.redaction import LONGEST
from noetl_dagster.result_ref import RefKind, ResultRef, ResultScope, RowsAround, logical_ref
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.codec import THREAD_ABOVE, Encoded, RunningDigest, digest_of
from noetl_dagster.storage.compression import Compression, compress_stream
from noetl_dagster.storage.manifests import Strategy, record_manifest
from noetl_dagster.storage.placement import KEY_ROOT, Placed, Placement, key_of, owner_of
from noetl_dagster.storage.reading import ResultReader
from noetl_dagster.storage.tiers.base import Bytes, TierUnavailableError
from noetl_dagster.values import is_table

log = logging.getLogger(__name__)

ORPHAN_GRACE = timedelta(days=1)
"""Age from which bytes without a reference count as abandoned: no put lasts that long."""

_PUTS_IN_FLIGHT = 32
_NO_SPEC = ResultSpec()


@dataclass(frozen=True, slots=True)
class NewResult:
    """A value to store.

    Attributes:
        value: bytes, text, a pandas, polars or Arrow table (as Parquet), or any value that JSON can express.
        spec: the task's ``spec.result``; its tier, name, scope, time to live, compression, content type.
        tier: overrides the tier of ``spec``; None chooses by size and settings.
        select: dotted paths of fields to copy into ``extracted``.
        parent_ref_id: the reference this one was made from.
        extra: facts of the format to keep next to the reference.
    """

    value: Any
    execution_id: int
    step: str
    name: str
    spec: ResultSpec = _NO_SPEC
    tier: StoreTier | None = None
    select: Sequence[str] = ()
    parent_ref_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class ResultStore(ResultReader):
    """Stores and fetches results. Stores are connected, and buckets created, on first use.

    Args:
        settings: filled settings (addresses of the stores).
        pool: connections to the event log's database; None works for explicit references, without
            logical names, manifests and clean-up.
        ids: source of reference ids; None makes one for this process.
    """

    def __init__(self, settings: Settings, pool: asyncpg.Pool | None, *, ids: Snowflake | None = None) -> None:
        super().__init__(settings, Placement(settings, pool), RefCatalog(pool))
        self._ids = ids or Snowflake(process_node())

    async def close(self) -> None:
        """Closes the tiers that were used."""
        await self._placement.close()

    async def __aenter__(self) -> ResultStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- storing -------------------------------------------------------------------------------------

    async def put(
        self,
        value: Any,
        *,
        execution_id: int,
        step: str,
        name: str,
        spec: ResultSpec = _NO_SPEC,
        tier: StoreTier | None = None,
        select: Sequence[str] = (),
        parent_ref_id: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> ResultRef:
        """Stores one value, described as in :class:`NewResult`, and records its reference.

        Raises:
            StorageError: the value cannot be encoded, or no tier accepted it; nothing is recorded then.
        """
        item = NewResult(value, execution_id, step, name, spec, tier, select, parent_ref_id, extra or {})
        return await self._record(await self._place(item))

    async def put_many(self, items: Sequence[NewResult]) -> list[ResultRef]:
        """Stores many results; their rows are written in one statement, in order."""
        limit = asyncio.Semaphore(_PUTS_IN_FLIGHT)

        async def place(item: NewResult) -> ResultRef:
            async with limit:
                return await self._place(item)

        refs = await asyncio.gather(*map(place, items))
        await self._catalog.record(refs)
        return refs

    async def digest(self, value: Any, spec: ResultSpec) -> str:
        """Returns the checksum that a value would be stored with; stores nothing."""
        encoded = await self._encode(value, spec)
        return await asyncio.to_thread(digest_of, encoded.data)

    async def put_stream(
        self,
        chunks: AsyncIterable[Bytes],
        *,
        execution_id: int,
        step: str,
        name: str,
        spec: ResultSpec = _NO_SPEC,
        tier: StoreTier | None = None,
        content_type: str | None = None,
    ) -> ResultRef:
        """Stores a stream of bytes in constant memory.

        If the stream or the store fails, nothing is stored and nothing is recorded.
        """
        where = (execution_id, step, spec.name or name)
        content_type = content_type or spec.content_type or codec.BINARY
        compression, most = Compression(spec.compression), codec.PREVIEW_BYTES
        digest, head, size = RunningDigest(), b"", 0

        async def metered() -> AsyncIterator[Bytes]:
            nonlocal head, size
            async for chunk in compress_stream(chunks, compression):
                size += len(chunk)
                head += bytes(chunk[: most + LONGEST - len(head)])
                await digest.add(chunk)
                yield chunk

        ref_id = self._ids.next()
        key = key_of(*where, ref_id, codec.EXTENSIONS.get(content_type, ""))
        chosen = self._placement.choose(None, tier or spec.store)
        placed = await self._placement.put_stream(chosen, key, metered())
        readable = compression is Compression.NONE and codec.is_readable(content_type)
        ref = self._ref(
            ref_id,
            where,
            spec,
            placed,
            content_type=content_type,
            compression=compression.value,
            bytes_size=size,
            sha256=await digest.hexdigest(),
            preview=codec.clip(head, most) if readable else None,
        )
        return await self._record(ref)

    async def register_dataset(
        self,
        physical_uri: str,
        *,
        execution_id: int,
        step: str,
        name: str,
        files: Sequence[str] = (),
        rows: int | None = None,
        schema: Mapping[str, str] | None = None,
        bytes_size: int = 0,
        content_type: str = codec.PARQUET,
        extra: Mapping[str, Any] | None = None,
    ) -> ResultRef:
        """Records a folder of files that Spark, for example, has written in place.

        Args:
            physical_uri: the folder, ``s3://``, ``gs://``, ``file:///`` or an absolute path.
            files: file names below it, recorded in ``extra``.
            schema: column name to type.
            bytes_size: bytes of all files together.
        """
        tier = locations.tier_of_uri(physical_uri, self.settings)
        facts: dict[str, Any] = {"files": list(files), **(extra or {})}
        if schema is not None:
            facts["columns"] = dict(schema)
        owner = owner_of(KEY_ROOT + physical_uri.rstrip("/").rpartition(KEY_ROOT)[2])
        ref = self._ref(
            owner[1] if owner else self._ids.next(),  # the id in a URI of dataset_uri
            (execution_id, step, name),
            _NO_SPEC,
            Placed(tier, physical_uri.rstrip("/") + "/"),
            kind=RefKind.DATASET,
            content_type=content_type,
            bytes_size=bytes_size,
            rows=rows,
            extra=facts,
        )
        return await self._record(ref)

    async def register_part(
        self, dataset: ResultRef, file: str, *, name: str, bytes_size: int, rows: int | None = None
    ) -> ResultRef:
        """Records one file of a dataset as a separate result, which is removed with the dataset.

        Args:
            file: its name below the dataset. One in a folder ``name=value`` is read with those columns.
        """
        ref_id = self._ids.next()
        alone = "/" not in file
        ref = dataset.model_copy(
            update={
                "ref": logical_ref(dataset.execution_id, dataset.source_step, ref_id),
                "ref_id": ref_id,
                "name": name,
                "kind": RefKind.OBJECT if alone else RefKind.DATASET,
                "physical_uri": dataset.physical_uri + file if alone else dataset.physical_uri,
                "bytes_size": bytes_size,
                "rows": rows,
                "preview": None,
                "parent_ref_id": dataset.ref_id,
                "extra": {**dataset.extra, "files": [file]},
            }
        )
        await self._catalog.record([ref])
        return ref

    def dataset_uri(self, *, execution_id: int, step: str, name: str, tier: StoreTier | None = None) -> str:
        """Returns a new folder URI for a dataset that is written in place and then registered.

        The URI contains the id of the future reference, so that removal can recognise datasets that never got one.
        """
        used = self._placement.choose(None, tier)
        key = key_of(execution_id, step, name, self._ids.next(), ".parquet")
        return self._placement.tier(used).uri(key) + "/"

    async def ready(self, tier: StoreTier) -> None:
        """Returns when a tier can be written in place; creates a missing bucket."""
        await self._placement.tier(tier).ready()

    async def manifest(
        self,
        execution_id: int,
        step: str,
        name: str,
        parts: AsyncIterable[ResultRef] | Iterable[ResultRef],
        strategy: Strategy | str = Strategy.APPEND,
        *,
        spec: ResultSpec = _NO_SPEC,
        around: RowsAround | None = None,
        extracted: Mapping[str, Any] | None = None,
    ) -> ResultRef:
        """Records one result that consists of others, in order, without fetching or holding them.

        Args:
            strategy: how readers combine the parts, see :class:`Strategy`.
            around: the mapping that surrounds the rows in the parts; it implies ``Strategy.ROWS``.
            extracted: fields to keep next to the reference.
        """
        ref_id = self._ids.next()
        extra: dict[str, Any] = {"strategy": Strategy(strategy).value}
        if around is not None:
            extra = {
                "strategy": Strategy.CONCAT.value,
                "around": around.model_dump(mode="json", exclude_defaults=True),
            }
        ref = self._ref(
            ref_id,
            (execution_id, step, spec.name or name),
            spec,
            Placed(StoreTier.DB, f"db://manifest/{ref_id}"),
            kind=RefKind.MANIFEST,
            extra=extra,
            extracted=dict(extracted or {}),
        )
        return await record_manifest(self._catalog, ref, parts, Strategy(extra["strategy"]))

    # -- removing ------------------------------------------------------------------------------------

    # Bytes go before their rows, so that the next call finds and completes an interrupted removal.

    async def delete(self, ref: ResultRef | str) -> None:
        """Removes a result's bytes, then its row. A manifest's parts are separate results and stay."""
        stored = await self._catalog.by_ref(ref) if isinstance(ref, str) else ref
        await self._delete_bytes(stored)
        await self._catalog.forget([stored.ref_id])

    async def cleanup(self, now: datetime | None = None) -> int:
        """Removes expired results, a page at a time. Several processes may do so at once. Returns the number removed.

        If a store does not answer, its results stay for the next call.
        """
        now, removed = now or datetime.now(UTC), 0
        while True:
            async with self._catalog.locked_expired(now) as (connection, refs):
                outcomes = await asyncio.gather(*map(self._delete_bytes, refs), return_exceptions=True)
                gone = [ref.ref_id for ref, outcome in zip(refs, outcomes, strict=True) if outcome is None]
                await self._catalog.forget(gone, connection)
            removed += len(gone)
            if not gone:
                return removed

    async def sweep_orphans(self, now: datetime | None = None, *, execution_id: int | None = None) -> int:
        """Removes bytes without a reference, from puts that were killed or rolled back. Returns the number of objects.

        The key of an object contains its execution and reference id, and thereby its time; objects younger than
        :data:`ORPHAN_GRACE` stay. Only objects of ended executions are removed, and with ``NOETL_STORES_SHARED=false``
        those of executions that the log does not contain. Of the disk tier only this machine's is swept. A store that
        does not answer is left for the next call.
        """
        before, check, removed = (now or datetime.now(UTC)) - ORPHAN_GRACE, self.check(), 0
        for name in self._placement.lasting():
            try:
                async for uri in check.orphans_in(name, before, execution_id):
                    await self._placement.tier(name).delete(uri)
                    removed += 1
            except TierUnavailableError as error:
                log.warning("%s", error)
        if removed:
            log.info("removed %d objects without a reference", removed)
        return removed

    async def _delete_bytes(self, ref: ResultRef) -> None:
        if ref.kind is not RefKind.MANIFEST:
            await self._placement.tier(ref.store_tier).delete(ref.physical_uri)

    # -- inside --------------------------------------------------------------------------------------

    async def _place(self, item: NewResult) -> ResultRef:
        """Encodes and stores one value without recording its reference."""
        spec = item.spec
        encoded = await self._encode(item.value, spec)
        data, ref_id, name = encoded.data, self._ids.next(), spec.name or item.name
        extension = codec.EXTENSIONS.get(encoded.content_type, "")
        key = key_of(item.execution_id, item.step, name, ref_id, extension)
        tier = self._placement.choose(len(data), item.tier or spec.store)
        if len(data) < THREAD_ABOVE:
            sha256, placed = digest_of(data), await self._placement.put(tier, key, data)
        else:  # hashing releases the interpreter
            sha256, placed = await asyncio.gather(
                asyncio.to_thread(digest_of, data), self._placement.put(tier, key, data)
            )
        return self._ref(
            ref_id,
            (item.execution_id, item.step, name),
            spec,
            placed,
            content_type=encoded.content_type,
            compression=spec.compression,
            bytes_size=len(data),
            sha256=sha256,
            rows=encoded.rows,
            preview=encoded.preview,
            extracted=codec.select_fields(item.value, item.select, self.settings.inline_result_bytes),
            parent_ref_id=item.parent_ref_id,
            extra={**encoded.extra, **item.extra},
        )

    async def _record(self, ref: ResultRef) -> ResultRef:
        """Records a reference whose bytes are stored."""
        await self._catalog.record([ref])
        return ref

    async def _encode(self, value: Any, spec: ResultSpec) -> Encoded:
        compression = Compression(spec.compression)

        def encode() -> Encoded:
            return codec.encode(
                value,
                content_type=spec.content_type,
                compression=compression,
            )

        heavy = compression is not Compression.NONE or is_table(value)
        return await asyncio.to_thread(encode) if heavy else encode()

    def _ref(
        self, ref_id: int, where: tuple[int, str, str], spec: ResultSpec, placed: Placed, **fields: Any
    ) -> ResultRef:
        execution_id, step, name = where
        scope = ResultScope(spec.scope)
        expires = spec.ttl is not None and scope is not ResultScope.PERMANENT
        if placed.instead_of is not None:
            fields["extra"] = {**fields.get("extra", {}), "fallback_from": placed.instead_of.value}
        return ResultRef(
            ref=logical_ref(execution_id, step, ref_id),
            ref_id=ref_id,
            execution_id=execution_id,
            source_step=step,
            name=name,
            store_tier=placed.tier,
            physical_uri=placed.uri,
            scope=scope,
            expires_at=datetime.now(UTC) + timedelta(seconds=spec.ttl or 0) if expires else None,
            **fields,
        )


def fits_inline(size: int, settings: Settings) -> bool:
    """Reports whether a value of so many bytes of JSON stays in the event itself."""
    return size <= settings.inline_result_bytes
