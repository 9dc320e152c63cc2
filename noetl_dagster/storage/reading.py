"""Fetches results by reference and verifies them, whole or in constant memory."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from noetl_dagster.errors import FormatError, IntegrityError, ReferenceNotAvailableError, StorageError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.storage.checking import ObjectCheck
from noetl_dagster.storage.codec import THREAD_ABOVE, RunningDigest, digest_of
from noetl_dagster.storage.compression import decompress, decompress_stream
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.storage.placement import Placement
from noetl_dagster.storage.tiers.base import Bytes
from noetl_dagster.values import admit, encode_json, is_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import dataset as arrow_dataset

Batch: TypeAlias = "list[Any] | pa.RecordBatch"

_ROWS_A_BATCH = 1024


class ResultReader:
    """Fetches results by reference or by name; the base class of the store."""

    def __init__(self, settings: Settings, placement: Placement, catalog: RefCatalog) -> None:
        self.settings = settings
        self._placement = placement
        self._catalog = catalog

    async def find(self, what: str | tuple[int, str, str]) -> ResultRef:
        """Returns the reference of a logical name, or the latest of ``(execution id, step, name)``.

        Raises ``ReferenceNotAvailableError`` if there is none, or if it has expired.
        """
        lookup = self._catalog.by_ref(what) if isinstance(what, str) else self._catalog.by_name(*what)
        return _unexpired(await lookup)

    async def get(self, ref: ResultRef | str) -> Any:
        """Returns the value of a reference: an object, bytes, text, an Arrow table, or a manifest's combined parts.

        Raises:
            ReferenceNotAvailableError: nothing is stored there.
            IntegrityError: the bytes differ from those that were stored.
        """
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            return await self._assemble(ref)
        if ref.kind is RefKind.DATASET:
            return await asyncio.to_thread(lambda: self._dataset(ref).to_table())
        data = await self._read(ref)
        if ref.compression == "none" and ref.content_type == codec.BINARY:
            return bytes(data)
        with _naming(ref):
            return codec.decode(data, ref.content_type, ref.compression)

    async def get_bytes(self, ref: ResultRef | str) -> bytes:
        """Returns the bytes of :meth:`stream`, verified."""
        return b"".join([chunk async for chunk in self.stream(ref)])

    async def stream(self, ref: ResultRef | str) -> AsyncIterator[Bytes]:
        """Yields the decompressed bytes of an object, or the encoded value of a manifest, in constant memory.

        Raises:
            IntegrityError: after the last chunk, if the bytes differ from those that were stored.
        """
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            chunks: AsyncIterable[Bytes] = self._content(ref)
        else:
            chunks = decompress_stream(self._chunks(ref), ref.compression)
        with _naming(ref):
            async for chunk in chunks:
                yield chunk

    async def content_type(self, ref: ResultRef | str) -> str:
        """Returns the content type of the bytes of :meth:`stream`.

        That of a manifest is Parquet for tables joined end to end, and JSON for anything else.
        """
        ref = await self._resolve(ref)
        if ref.kind is not RefKind.MANIFEST:
            return ref.content_type
        if strategy_of(ref) is not Strategy.CONCAT:
            return codec.JSON
        type_of_parts = codec.JSON
        async for part in self.parts(ref):
            nested = part.kind is RefKind.MANIFEST
            type_of_parts = await self.content_type(part) if nested else part.content_type
            if type_of_parts != codec.PARQUET:
                return codec.JSON
        return type_of_parts

    async def parts(self, ref: ResultRef | str, start: int = 0, stop: int | None = None) -> AsyncIterator[ResultRef]:
        """Yields the references in a half-open range of a manifest; any other reference is its own only part."""
        ref = await self._resolve(ref)
        if ref.kind is not RefKind.MANIFEST:
            yield ref
            return
        if ref.extra.get("only_first"):
            stop = 1
        count, expected = 0, ref.extra.get("parts", 0) if start == 0 and stop is None else 0
        async for part in self._catalog.parts(ref.ref_id, start, stop):
            count += 1
            yield part if part.kind is not RefKind.MANIFEST else part.nested_in(ref)
        if count < expected:
            raise ReferenceNotAvailableError(f"{ref.ref} has {count} of its {expected} parts; run the step again")

    async def items(self, ref: ResultRef | str) -> AsyncIterator[Any]:
        """Yields the items of a result one by one, holding one part at a time.

        Items are the elements of a list, the rows of a table as admitted mappings, or those that a manifest's strategy
        defines.
        """
        async for batch in self.batches(ref):
            for item in batch if isinstance(batch, list) else admit(batch.to_pylist(), "row"):
                yield item

    async def batches(self, ref: ResultRef | str) -> AsyncIterator[Batch]:
        """Yields the items of a result in batches, holding one part at most: lists, or Arrow batches of a table."""
        ref = await self._resolve(ref)
        if ref.kind is RefKind.MANIFEST:
            match strategy_of(ref):
                case Strategy.APPEND:
                    async for part in self.parts(ref):
                        yield [await self.get(part)]
                case Strategy.CONCAT:
                    async for part in self.parts(ref):
                        async for batch in self.batches(part):
                            yield batch
                case Strategy.ROWS:
                    yield [await self._assemble(ref)]
        elif ref.kind is RefKind.DATASET:
            batches = (await asyncio.to_thread(self._dataset, ref)).to_batches()
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        elif ref.content_type == codec.JSON_LINES:  # parsed rows are several times larger
            data = await self._read(ref)
            with _naming(ref):
                for rows in codec.rows_of_lines(decompress(data, ref.compression)):
                    yield rows
        elif is_table(value := await self.get(ref)):
            for batch in value.to_batches(max_chunksize=_ROWS_A_BATCH):
                yield batch
        else:
            yield value if isinstance(value, list) else [value]

    def check(self, *, quick: bool = False) -> ObjectCheck:
        """Returns a check of the stores; a ``quick`` one does not read the objects."""
        return ObjectCheck(self._placement, self._catalog, self.settings.stores_shared, quick)

    # -- one object ----------------------------------------------------------------------------------

    async def _resolve(self, ref: ResultRef | str) -> ResultRef:
        return _unexpired(await self._catalog.by_ref(ref) if isinstance(ref, str) else ref)

    async def _read(self, ref: ResultRef) -> Bytes:
        """Returns the stored bytes, verified. Large ones are hashed while they arrive."""
        _require_object(ref)
        if ref.bytes_size >= THREAD_ABOVE:
            whole, size = bytearray(ref.bytes_size), 0
            async for chunk in self._chunks(ref):
                whole[size : size + len(chunk)] = chunk
                size += len(chunk)
            del whole[size:]
            return memoryview(whole)
        try:
            data = await self._placement.tier(ref.store_tier).get(ref.physical_uri)
        except KeyError as error:
            raise _missing(ref) from error
        _verify(ref, digest_of(data))
        return data

    async def _chunks(self, ref: ResultRef) -> AsyncIterator[Bytes]:
        """Yields the stored bytes, and verifies them after the last chunk."""
        _require_object(ref)
        digest = RunningDigest()
        try:
            async for chunk in self._placement.tier(ref.store_tier).stream(ref.physical_uri):
                await digest.add(chunk)
                yield chunk
        except KeyError as error:
            raise _missing(ref) from error
        _verify(ref, await digest.hexdigest())

    def _dataset(self, ref: ResultRef) -> arrow_dataset.Dataset:
        return locations.dataset(
            self.settings, ref.physical_uri, ref.extra.get("files"), columns=ref.extra.get("columns")
        )

    # -- several parts -------------------------------------------------------------------------------

    async def _assemble(self, ref: ResultRef) -> Any:
        """Returns the whole value of a manifest. Tables that are joined end to end stay a table."""
        match strategy_of(ref):
            case Strategy.APPEND:
                return [await self.get(part) async for part in self.parts(ref)]
            case Strategy.CONCAT:
                return _joined([await self.get(part) async for part in self.parts(ref)])
            case Strategy.ROWS:
                return await self._with_rows(ref, await self._assemble(ref.rows_alone))

    async def _with_rows(self, ref: ResultRef, rows: Any) -> dict[str, Any]:
        """Returns the mapping around the rows of a manifest, with its stored fields."""
        around = ref.around
        assert around is not None
        return around.mapping(rows, {name: await self.get(one) for name, one in around.stored.items()})

    async def _content(self, ref: ResultRef) -> AsyncIterator[bytes]:
        """Yields a manifest's value as the bytes of one object, with one part in memory at most."""
        as_parquet = await self.content_type(ref) == codec.PARQUET
        async for data in self._parquet(ref) if as_parquet else self._json(ref):
            yield data

    async def _json(self, ref: ResultRef) -> AsyncIterator[bytes]:
        strategy = strategy_of(ref) if ref.kind is RefKind.MANIFEST else None
        if strategy is Strategy.APPEND:
            before = b"["
            async for part in self.parts(ref):
                yield before
                async for data in self._json(part):
                    yield data
                before = b","
            yield b"[]" if before == b"[" else b"]"
        elif strategy is Strategy.CONCAT:
            before = b"["
            async for batch in self.batches(ref):
                if items := batch if isinstance(batch, list) else admit(batch.to_pylist()):
                    yield before + encode_json(items)[1:-1]
                    before = b","
            yield b"[]" if before == b"[" else b"]"
        elif strategy is Strategy.ROWS:
            place = uuid.uuid4().hex  # replaced by the rows
            whole = encode_json(await self._with_rows(ref, place))
            *pieces, end = whole.split(encode_json(place))
            for piece in pieces:
                yield piece
                async for data in self._json(ref.rows_alone):
                    yield data
            yield end
        else:
            value = await self.get(ref)
            yield encode_json(admit(value.to_pylist()) if is_table(value) else value)

    async def _parquet(self, ref: ResultRef) -> AsyncIterator[bytes]:
        """Yields the parts as one Parquet file. Reads them twice: a later part may determine a column's type."""
        import pyarrow as pa
        from pyarrow import parquet

        schema = pa.schema([])
        async for part in self.parts(ref):
            own = (await self.get(part)).schema
            schema = pa.unify_schemas([schema, own], promote_options="default")
        sink = io.BytesIO()  # emptied after each part
        writer = parquet.ParquetWriter(sink, schema)
        async for part in self.parts(ref):
            table = pa.concat_tables([schema.empty_table(), await self.get(part)], promote_options="default")
            await asyncio.to_thread(writer.write_table, table)
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
        writer.close()
        yield sink.getvalue()


def _joined(values: list[Any]) -> Any:
    if values and all(is_table(value) for value in values):
        import pyarrow as pa

        return pa.concat_tables(values, promote_options="default")
    joined: list[Any] = []
    for value in values:
        rows = admit(value.to_pylist()) if is_table(value) else value
        joined.extend(rows if isinstance(rows, list) else [rows])
    return joined


@contextmanager
def _naming(ref: ResultRef) -> Iterator[None]:
    """Adds the place to errors about the content of a result."""
    try:
        yield
    except FormatError as error:
        raise IntegrityError(f"{ref.ref}: at {ref.physical_uri[:200]}, {error}; run the step again") from error


def _require_object(ref: ResultRef) -> None:
    if ref.kind is not RefKind.OBJECT:
        raise StorageError(f"{ref.ref} is a {ref.kind.value}, not one object; read its items or parts")


def _verify(ref: ResultRef, digest: str) -> None:
    if ref.sha256 is not None and digest != ref.sha256:
        raise locations.damaged(ref.physical_uri, digest, ref.sha256, ref.ref)


def _missing(ref: ResultRef) -> ReferenceNotAvailableError:
    return ReferenceNotAvailableError(
        f"{ref.ref}: nothing is at {ref.physical_uri[:200]} ({ref.store_tier.value} tier); "
        "it expired, was deleted, or belongs to another machine"
    )


def _unexpired(ref: ResultRef) -> ResultRef:
    if ref.expires_at is not None and ref.expires_at <= datetime.now(UTC):
        raise ReferenceNotAvailableError(f"{ref.ref} expired at {ref.expires_at}; run the step again")
    return ref
