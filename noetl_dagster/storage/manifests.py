"""Results that consist of parts: recorded as lists of references and read part by part."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from noetl_dagster.errors import StorageError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import codec, locations, queries
from noetl_dagster.storage.catalog import RefCatalog

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import dataset as arrow_dataset

T = TypeVar("T")

Batch: TypeAlias = "list[Any] | pa.RecordBatch"

_PARTS_A_STATEMENT = 1000
_ROWS_A_BATCH = 1024


class Strategy(StrEnum):
    """The ways to combine the parts of a manifest.

    Attributes:
        APPEND: a list with one item per part, in order (results of a loop).
        CONCAT: lists or tables joined end to end (pages, chunks, shards of a table).
        ROWS: as CONCAT, inside a mapping that the reference holds (``ResultRef.around``: SQL results).
        MERGE: mappings; later keys replace earlier ones.
        REPLACE: the last part.
    """

    APPEND = "append"
    CONCAT = "concat"
    ROWS = "rows"
    MERGE = "merge"
    REPLACE = "replace"


class PartReader(Protocol):
    """The reader that combining parts needs."""

    settings: Settings

    async def get(self, ref: ResultRef | str) -> Any:
        """Returns the value of a reference."""
        ...

    def lines(self, ref: ResultRef) -> AsyncIterator[list[Any]]:
        """Yields the rows of an object of JSON lines in batches."""
        ...

    def parts(self, ref: ResultRef | str) -> AsyncIterator[ResultRef]:
        """Yields the references in a manifest, in order."""
        ...


async def record_manifest(
    catalog: RefCatalog,
    ref: ResultRef,
    parts: AsyncIterable[ResultRef] | Iterable[ResultRef],
    strategy: Strategy,
    connection: Any,
) -> ResultRef:
    """Writes the rows of a manifest in one transaction and returns its reference with the totals filled."""
    count, size, rows = 0, 0, 0
    counted, first = True, None
    async with catalog.connection(connection) as open_connection, open_connection.transaction():
        await catalog.record([ref], open_connection)
        await open_connection.execute(queries.INSERT_MANIFEST, ref.ref_id, strategy.value)
        async for page in in_runs(_each(parts), _PARTS_A_STATEMENT):
            indexes = list(range(count, count + len(page)))
            await open_connection.execute(
                queries.INSERT_PARTS,
                ref.ref_id,
                indexes,
                [part.ref_id for part in page],
                [part.bytes_size for part in page],
            )
            first = first or page[0]
            count += len(page)
            size += sum(part.bytes_size for part in page)
            counted = counted and all(part.rows is not None for part in page)
            rows += sum(part.rows or 0 for part in page)
        total = count if strategy is Strategy.APPEND else rows if counted else None
        await open_connection.execute(queries.CLOSE_MANIFEST, ref.ref_id, count, size, total)
        extra, preview = {**ref.extra, "parts": count}, ref.preview
        if strategy is Strategy.CONCAT and first is not None:  # a part looks like the whole
            preview = first.preview
            extra |= {"columns": first.extra["columns"]} if "columns" in first.extra else {}
        filled = ref.model_copy(
            update={"bytes_size": size, "rows": total, "preview": preview, "extra": extra}
        )
        fields = (size, total, codec.dump_json(extra).decode(), preview)
        await open_connection.execute(queries.FILL_MANIFEST_REF, ref.ref_id, *fields)
    return filled


async def in_runs(stream: AsyncIterable[T], length: int) -> AsyncIterator[list[T]]:
    """Cuts a stream into lists of ``length``; the last may be shorter."""
    run: list[T] = []
    async for one in stream:
        run.append(one)
        if len(run) == length:
            yield run
            run = []
    if run:
        yield run


async def _each(parts: AsyncIterable[ResultRef] | Iterable[ResultRef]) -> AsyncIterator[ResultRef]:
    if isinstance(parts, AsyncIterable):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part


def strategy_of(ref: ResultRef) -> Strategy:
    """Returns the strategy that a manifest's reference records."""
    if "around" in ref.extra:
        return Strategy.ROWS
    return Strategy(ref.extra.get("strategy", Strategy.APPEND))


async def batches(reader: PartReader, ref: ResultRef) -> AsyncIterator[Batch]:
    """Yields the items of any reference in batches, with one part in memory at most."""
    if ref.kind is not RefKind.MANIFEST:
        async for batch in _batches_of_one(reader, ref):
            yield batch
        return
    match strategy_of(ref):
        case Strategy.APPEND:
            async for part in reader.parts(ref):
                yield [await reader.get(part)]
        case Strategy.CONCAT:
            async for part in reader.parts(ref):
                async for batch in batches(reader, part):
                    yield batch
        case Strategy.ROWS | Strategy.MERGE | Strategy.REPLACE:
            yield [await assemble(reader, ref)]


async def assemble(reader: PartReader, ref: ResultRef) -> Any:
    """Returns the whole value of a manifest. Tables that are joined end to end stay a table."""
    match strategy_of(ref):
        case Strategy.APPEND:
            return [await reader.get(part) async for part in reader.parts(ref)]
        case Strategy.CONCAT:
            return _joined([await reader.get(part) async for part in reader.parts(ref)])
        case Strategy.ROWS:
            around = ref.around
            assert around is not None
            stored = {name: await reader.get(one) for name, one in around.stored.items()}
            return around.mapping(await assemble(reader, ref.rows_alone), stored)
        case Strategy.MERGE:
            merged: dict[str, Any] = {}
            async for part in reader.parts(ref):
                merged.update(_mapping(await reader.get(part), part))
            return merged
        case Strategy.REPLACE:
            last: ResultRef | None = None
            async for part in reader.parts(ref):
                last = part
            return None if last is None else await reader.get(last)


def _joined(values: list[Any]) -> Any:
    if values and all(codec.is_table(value) for value in values):
        import pyarrow as pa

        return pa.concat_tables(values, promote_options="default")
    joined: list[Any] = []
    for value in values:
        joined.extend(_elements(value))
    return joined


def _elements(value: Any) -> Iterable[Any]:
    if codec.is_table(value):
        return value.to_pylist()  # type: ignore[no-any-return]
    return value if isinstance(value, list) else [value]


def _mapping(value: Any, part: ResultRef) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StorageError(
            f"{part.ref} is a {type(value).__name__}, and strategy 'merge' joins mappings; "
            "use 'append' or 'concat'"
        )
    return value


async def _batches_of_one(reader: PartReader, ref: ResultRef) -> AsyncIterator[Batch]:
    if ref.kind is RefKind.DATASET:
        found = (await asyncio.to_thread(_dataset, reader.settings, ref)).to_batches()
        while (batch := await asyncio.to_thread(next, found, None)) is not None:
            yield batch
        return
    if ref.content_type == codec.JSON_LINES:
        async for rows in reader.lines(ref):
            yield rows
        return
    value = await reader.get(ref)
    if codec.is_table(value):
        for batch in value.to_batches(max_chunksize=_ROWS_A_BATCH):
            yield batch
        return
    yield list(_elements(value))


async def content_type(reader: PartReader, ref: ResultRef) -> str:
    """Returns the content type of :func:`content`: Parquet for tables joined end to end, JSON for anything else."""
    if strategy_of(ref) is not Strategy.CONCAT:
        return codec.JSON
    kinds: set[str] = set()
    async for part in reader.parts(ref):
        nested = part.kind is RefKind.MANIFEST
        kinds.add(await content_type(reader, part) if nested else part.content_type)
        if kinds != {codec.PARQUET}:
            return codec.JSON
    return codec.PARQUET if kinds else codec.JSON


async def content(reader: PartReader, ref: ResultRef) -> AsyncIterator[bytes]:
    """Yields a manifest's value as the bytes of one object, with one part in memory at most."""
    as_parquet = await content_type(reader, ref) == codec.PARQUET
    async for data in _parquet(reader, ref) if as_parquet else _json(reader, ref):
        yield data


async def _json(reader: PartReader, ref: ResultRef) -> AsyncIterator[bytes]:
    if ref.kind is not RefKind.MANIFEST:
        yield _json_of(await reader.get(ref))
        return
    match strategy_of(ref):
        case Strategy.APPEND:
            before = b"["
            async for part in reader.parts(ref):
                yield before
                async for data in _json(reader, part):
                    yield data
                before = b","
            yield b"[]" if before == b"[" else b"]"
        case Strategy.CONCAT:
            before = b"["
            async for batch in batches(reader, ref):
                items = batch if isinstance(batch, list) else batch.to_pylist()
                if items:
                    yield before + codec.dump_json(items)[1:-1]
                    before = b","
            yield b"[]" if before == b"[" else b"]"
        case Strategy.ROWS:
            around = ref.around
            assert around is not None
            stored = {name: await reader.get(one) for name, one in around.stored.items()}
            place = uuid.uuid4().hex  # replaced by the rows
            *pieces, end = _json_of(around.mapping(place, stored)).split(codec.dump_json(place))
            for piece in pieces:
                yield piece
                async for data in _json(reader, ref.rows_alone):
                    yield data
            yield end
        case Strategy.MERGE | Strategy.REPLACE:
            yield _json_of(await assemble(reader, ref))


def _json_of(value: Any) -> bytes:
    return codec.dump_json(value.to_pylist() if codec.is_table(value) else value)


async def _parquet(reader: PartReader, ref: ResultRef) -> AsyncIterator[bytes]:
    """Yields the parts as one Parquet file. Reads them twice, since a later part may determine a column's type."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([])
    async for part in reader.parts(ref):
        found = (await reader.get(part)).schema
        schema = pa.unify_schemas([schema, found], promote_options="default")
    sink = _Drained()
    writer = parquet.ParquetWriter(sink, schema)
    async for part in reader.parts(ref):
        table = pa.concat_tables([schema.empty_table(), await reader.get(part)], promote_options="default")
        await asyncio.to_thread(writer.write_table, table)
        yield sink.taken()
    writer.close()
    yield sink.taken()


class _Drained:
    """A file whose content is removed while it is written."""

    closed = False

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def flush(self) -> None:
        """Has nothing to flush."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


def read_dataset(settings: Settings, ref: ResultRef) -> pa.Table:
    """Returns all rows of a dataset as one Arrow table."""
    return _dataset(settings, ref).to_table()


def _dataset(settings: Settings, ref: ResultRef) -> arrow_dataset.Dataset:
    return locations.dataset(
        settings, ref.physical_uri, ref.extra.get("files"), columns=ref.extra.get("columns")
    )
