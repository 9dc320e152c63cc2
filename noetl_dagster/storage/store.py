"""The result store: values in, references out, and back.

Large values never travel through events. They are stored here, in a tier chosen by size and settings, and events
carry a :class:`~noetl_dagster.result_ref.ResultRef` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Required, TypedDict, Unpack

import asyncpg

from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.result_ref import RefKind, ResultRef, ResultScope, RowsAround, logical_ref
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage import codec, locations, manifests
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.checksum import THREAD_ABOVE, Meter, digest_of
from noetl_dagster.storage.codec import Compression, Encoded
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.placement import KEY_ROOT, Placed, Placement, key_of, owner_of
from noetl_dagster.storage.reading import ResultReader
from noetl_dagster.storage.removal import ORPHAN_GRACE, Removal
from noetl_dagster.storage.tiers.base import Bytes

_PUTS_IN_FLIGHT = 32
_NO_SPEC = ResultSpec()


@dataclass(frozen=True, slots=True)
class NewResult:
    """A value to store.

    Attributes:
        value: bytes, text, a pandas, polars or Arrow table (as Parquet), or any value that JSON can express.
        spec: the task's ``spec.result``; its tier, name, scope, time to live, compression, content type.
        tier: overrides the tier of ``spec``; None chooses by size and settings.
        content_type: of bytes or text.
        select: dotted paths of fields to copy into ``extracted``.
        parent_ref_id: the reference this one was made from.
        extra: facts of the format to keep next to the reference.
    """

    value: Any
    execution_id: int
    step: str
    name: str
    spec: ResultSpec | None = None
    tier: StoreTier | None = None
    content_type: str | None = None
    select: Sequence[str] = ()
    parent_ref_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Kept(TypedDict, total=False):
    """Name and storage options of a result; see :class:`NewResult`."""

    execution_id: Required[int]
    step: Required[str]
    name: Required[str]
    spec: ResultSpec | None
    tier: StoreTier | None
    content_type: str | None
    parent_ref_id: int | None
    extra: Mapping[str, Any]


class ResultStore(ResultReader):
    """Stores and fetches results.

    Args:
        settings: filled settings (addresses of the stores).
        pool: connections to the event log's database; None works for explicit references, without
            logical names, manifests and clean-up.
        ids: source of reference ids; None makes one for this process.
    """

    def __init__(
        self, settings: Settings, pool: asyncpg.Pool | None, *, ids: Snowflake | None = None
    ) -> None:
        super().__init__(settings, Placement(settings, pool), RefCatalog(pool))
        self._ids = ids or Snowflake(process_node())
        self._removal = Removal(self._placement, self._catalog)

    async def start(self) -> None:
        """Opens nothing: stores are connected and buckets are created on first use."""

    async def close(self) -> None:
        """Closes the tiers that were used."""
        await self._placement.close()

    async def __aenter__(self) -> ResultStore:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- storing -------------------------------------------------------------------------------------

    async def put(
        self,
        value: Any,
        *,
        select: Sequence[str] = (),
        connection: Any = None,
        **kept: Unpack[Kept],
    ) -> ResultRef:
        """Stores one value and records its reference.

        Args:
            value: see :class:`NewResult`, as for ``select`` and ``kept``.
            connection: the row joins this connection's transaction.

        Raises:
            StorageError: the value cannot be encoded, or no tier accepted it; nothing is recorded then.
        """
        ref = await self._place(NewResult(value, select=select, **kept))
        await self._catalog.record([ref], connection)
        return ref

    async def put_many(self, items: Sequence[NewResult], *, connection: Any = None) -> list[ResultRef]:
        """Stores many results; their rows are written in one statement, in order."""
        limit = asyncio.Semaphore(_PUTS_IN_FLIGHT)

        async def place(item: NewResult) -> ResultRef:
            async with limit:
                return await self._place(item)

        refs = await asyncio.gather(*map(place, items))
        await self._catalog.record(refs, connection)
        return refs

    async def digest(self, value: Any, spec: ResultSpec | None = None) -> str:
        """Returns the checksum that a value would be stored with; stores nothing.

        Raises:
            StorageError: the value cannot be encoded.
        """
        spec = spec or _NO_SPEC
        encoded = await self._encode(NewResult(value, 0, "", "", spec), spec)
        return await asyncio.to_thread(digest_of, encoded.data)

    async def put_stream(
        self,
        chunks: AsyncIterable[Bytes],
        *,
        connection: Any = None,
        **kept: Unpack[Kept],
    ) -> ResultRef:
        """Stores a stream of bytes in constant memory.

        If the stream or the store fails, nothing is stored and nothing is recorded.
        """
        item = NewResult(chunks, **kept)
        spec = item.spec or _NO_SPEC
        where = (item.execution_id, item.step, spec.name or item.name)
        kind_of_bytes = item.content_type or spec.content_type or codec.BINARY
        compression = Compression(spec.compression)
        meter = Meter(codec.compress_stream(chunks, compression), self.settings.result_preview_bytes)
        ref_id = self._ids.next()
        key = key_of(*where, ref_id, codec.EXTENSIONS.get(kind_of_bytes, ""))
        placed = await self._placement.put_stream(
            self._placement.choose(None, item.tier or spec.store), key, meter.chunks()
        )
        ref = self._ref(
            ref_id,
            where,
            spec,
            placed=placed,
            content_type=kind_of_bytes,
            compression=compression.value,
            bytes_size=meter.size,
            sha256=await meter.digest.hexdigest(),
            preview=meter.preview(kind_of_bytes, compression),
            parent_ref_id=item.parent_ref_id,
            extra=dict(item.extra),
        )
        await self._catalog.record([ref], connection)
        return ref

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
        tier: StoreTier | None = None,
        spec: ResultSpec | None = None,
        content_type: str = codec.PARQUET,
        preview: str | None = None,
        parent_ref_id: int | None = None,
        extra: Mapping[str, Any] | None = None,
        connection: Any = None,
    ) -> ResultRef:
        """Records a folder of files that Spark, for example, has written in place.

        Args:
            physical_uri: the folder, ``s3://``, ``gs://``, ``file:///`` or an absolute path.
            files: file names below it, recorded in ``extra``.
            schema: column name to type.
            bytes_size: bytes of all files together.
        """
        spec = spec or _NO_SPEC
        used = tier or locations.tier_of_uri(physical_uri, self.settings)
        facts: dict[str, Any] = {"files": list(files), **(extra or {})}
        if schema is not None:
            facts["columns"] = dict(schema)
        ref = self._ref(
            _id_in(physical_uri) or self._ids.next(),
            (execution_id, step, spec.name or name),
            spec,
            placed=Placed(used, physical_uri.rstrip("/") + "/"),
            kind=RefKind.DATASET,
            content_type=content_type,
            bytes_size=bytes_size,
            rows=rows,
            preview=preview and codec.clip(preview.encode(), self.settings.result_preview_bytes),
            parent_ref_id=parent_ref_id,
            extra=facts,
        )
        await self._catalog.record([ref], connection)
        return ref

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
        """Returns when a tier can be written in place; creates a missing bucket.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        await self._placement.tier(tier).ready()

    async def manifest(
        self,
        execution_id: int,
        step: str,
        name: str,
        parts: AsyncIterable[ResultRef] | Iterable[ResultRef],
        strategy: Strategy | str = Strategy.APPEND,
        *,
        spec: ResultSpec | None = None,
        around: RowsAround | None = None,
        extracted: Mapping[str, Any] | None = None,
        parent_ref_id: int | None = None,
        connection: Any = None,
    ) -> ResultRef:
        """Records one result that consists of others, in order, without fetching or holding them.

        Args:
            strategy: how readers combine the parts, see :class:`Strategy`.
            around: the mapping that surrounds the rows in the parts; it implies ``Strategy.ROWS``.
            extracted: fields to keep next to the reference.
        """
        spec, strategy = spec or _NO_SPEC, Strategy.CONCAT if around is not None else Strategy(strategy)
        ref_id = self._ids.next()
        ref = self._ref(
            ref_id,
            (execution_id, step, spec.name or name),
            spec,
            placed=Placed(StoreTier.DB, f"db://manifest/{ref_id}"),
            kind=RefKind.MANIFEST,
            parent_ref_id=parent_ref_id,
            extra={
                "strategy": strategy.value,
                **(
                    {}
                    if around is None
                    else {"around": around.model_dump(mode="json", exclude_defaults=True)}
                ),
            },
            extracted={} if extracted is None else dict(extracted),
        )
        return await manifests.record_manifest(self._catalog, ref, parts, strategy, connection)

    # -- removing ------------------------------------------------------------------------------------

    async def delete(self, ref: ResultRef | str) -> None:
        """Removes a result's bytes, then its row. A manifest's parts are separate results and stay."""
        await self._removal.one(await self._resolve(ref, expired_too=True))

    async def cleanup(self, now: datetime | None = None) -> int:
        """Removes expired results, bytes first. Several processes may do so at once. Returns the number removed.

        If a store does not answer, its results stay for the next call.
        """
        return await self._removal.expired(now or datetime.now(UTC))

    async def sweep_orphans(self, now: datetime | None = None, grace: timedelta = ORPHAN_GRACE) -> int:
        """Removes bytes without a reference, from puts that were killed or rolled back. Returns the number of objects.

        Interrupted uploads are aborted and counted too. Only objects of ended executions are removed, and with
        ``NOETL_STORES_SHARED=false`` those of executions that the log does not contain. Of the disk tier only this
        machine's is swept. A store that does not answer is left for the next call.
        """
        shared = self.settings.stores_shared
        return await self._removal.orphans(now or datetime.now(UTC), grace, shared=shared)

    # -- inside --------------------------------------------------------------------------------------

    async def _place(self, item: NewResult) -> ResultRef:
        """Encodes and stores one value without recording its reference."""
        spec = item.spec or _NO_SPEC
        encoded = await self._encode(item, spec)
        ref_id, name = self._ids.next(), spec.name or item.name
        extension = codec.EXTENSIONS.get(encoded.content_type, "")
        key = key_of(item.execution_id, item.step, name, ref_id, extension)
        tier = self._placement.choose(len(encoded.data), item.tier or spec.store)
        sha256, placed = await self._hash_and_put(tier, key, encoded.data)
        return self._ref(
            ref_id,
            (item.execution_id, item.step, name),
            spec,
            placed=placed,
            content_type=encoded.content_type,
            compression=encoded.compression.value,
            bytes_size=len(encoded.data),
            sha256=sha256,
            rows=encoded.rows,
            preview=encoded.preview,
            extracted=codec.select_fields(item.value, item.select, self.settings.inline_result_bytes),
            parent_ref_id=item.parent_ref_id,
            extra={**encoded.extra, **item.extra},
        )

    async def _encode(self, item: NewResult, spec: ResultSpec) -> Encoded:
        compression = Compression(spec.compression)

        def encode() -> Encoded:
            return codec.encode(
                item.value,
                content_type=item.content_type or spec.content_type,
                compression=compression,
                preview_bytes=self.settings.result_preview_bytes,
            )

        heavy = compression is not Compression.NONE or codec.is_table(item.value)
        return await asyncio.to_thread(encode) if heavy else encode()

    async def _hash_and_put(self, tier: StoreTier, key: str, data: Bytes) -> tuple[str, Placed]:
        """Stores bytes and hashes large ones meanwhile: hashing releases the interpreter."""
        if len(data) < THREAD_ABOVE:
            return digest_of(data), await self._placement.put(tier, key, data)
        return await asyncio.gather(asyncio.to_thread(digest_of, data), self._placement.put(tier, key, data))

    def _ref(
        self,
        ref_id: int,
        where: tuple[int, str, str],
        spec: ResultSpec,
        *,
        placed: Placed,
        extra: dict[str, Any],
        **fields: Any,
    ) -> ResultRef:
        execution_id, step, name = where
        scope = ResultScope(spec.scope)
        expires = spec.ttl is not None and scope is not ResultScope.PERMANENT
        if placed.instead_of is not None:
            extra = {**extra, "fallback_from": placed.instead_of.value}
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
            extra=extra,
            **fields,
        )


def fits_inline(value_bytes: bytes | int, settings: Settings) -> bool:
    """Reports whether a value, as JSON bytes or their number, stays in the event itself."""
    size = value_bytes if isinstance(value_bytes, int) else len(value_bytes)
    return size <= settings.inline_result_bytes


def _id_in(uri: str) -> int | None:
    """Returns the reference id in a URI of :meth:`ResultStore.dataset_uri`."""
    owner = owner_of(KEY_ROOT + uri.rstrip("/").rpartition(KEY_ROOT)[2])
    return owner and owner[1]
