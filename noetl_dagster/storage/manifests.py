"""Results made of parts: recorded as lists of references, read part by part, never merged to be built."""

from __future__ import annotations

import asyncio
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
    """How the parts of a manifest make one value.

    Attributes:
        APPEND: a list with one item a part, in order (results of a loop).
        CONCAT: parts that are lists or tables, end to end (pages, chunks, shards of a table).
        ROWS: as CONCAT, inside of a mapping that the reference holds (``ResultRef.around``: SQL results).
        MERGE: parts that are mappings, later keys over earlier ones.
        REPLACE: the last part.
    """

    APPEND = "append"
    CONCAT = "concat"
    ROWS = "rows"
    MERGE = "merge"
    REPLACE = "replace"


class PartReader(Protocol):
    """What putting parts together asks of whoever fetches them."""

    settings: Settings

    async def get(self, ref: ResultRef | str) -> Any:
        """The value of a reference."""
        ...

    def lines(self, ref: ResultRef) -> AsyncIterator[list[Any]]:
        """The rows of an object of JSON lines, some at a time."""
        ...

    def parts(self, ref: ResultRef | str) -> AsyncIterator[ResultRef]:
        """The references that a manifest is made of, in order."""
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
    """A stream as lists of ``length``; the last may be shorter."""
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
    if "around" in ref.extra:
        return Strategy.ROWS
    return Strategy(ref.extra.get("strategy", Strategy.APPEND))


async def batches(reader: PartReader, ref: ResultRef) -> AsyncIterator[Batch]:
    """Items of any reference, some at a time, with one part in memory at most."""
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
    """The whole value of a manifest. Tables that are joined end to end stay a table."""
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
        found = _dataset(reader.settings, ref).to_batches()
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


def read_dataset(settings: Settings, ref: ResultRef) -> pa.Table:
    """All rows of a dataset as one Arrow table."""
    return _dataset(settings, ref).to_table()


def _dataset(settings: Settings, ref: ResultRef) -> arrow_dataset.Dataset:
    return locations.dataset(
        settings, ref.physical_uri, ref.extra.get("files"), columns=ref.extra.get("columns")
    )
