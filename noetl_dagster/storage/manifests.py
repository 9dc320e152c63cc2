"""Results that consist of parts, recorded as lists of references."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from enum import StrEnum
from typing import TypeVar

from noetl_dagster.errors import IntegrityError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.storage.catalog import RefCatalog
from noetl_dagster.values import encode_json

T = TypeVar("T")

_PARTS_A_STATEMENT = 1000

_INSERT_MANIFEST = "INSERT INTO noetl.manifest (manifest_id, strategy) VALUES ($1, $2)"
_INSERT_PARTS = """
    INSERT INTO noetl.manifest_part (manifest_id, part_index, part_ref_id, bytes_size)
    SELECT $1, part_index, part_ref_id, bytes_size
    FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS given (part_index, part_ref_id, bytes_size)
"""
_CLOSE_MANIFEST = """
    UPDATE noetl.manifest SET total_parts = $2, total_bytes = $3, total_rows = $4 WHERE manifest_id = $1
"""
_FILL_REF = """
    UPDATE noetl.result_ref SET bytes_size = $2, rows = $3, extra = $4::text::jsonb, preview = $5 WHERE ref_id = $1
"""


class Strategy(StrEnum):
    """The ways to combine the parts of a manifest.

    Attributes:
        APPEND: a list with one item per part, in order (results of a loop).
        CONCAT: lists or tables joined end to end (pages, chunks, shards of a table).
        ROWS: as CONCAT, inside a mapping that the reference holds (``ResultRef.around``: SQL results).
    """

    APPEND = "append"
    CONCAT = "concat"
    ROWS = "rows"


async def record_manifest(
    catalog: RefCatalog,
    ref: ResultRef,
    parts: AsyncIterable[ResultRef] | Iterable[ResultRef],
    strategy: Strategy,
) -> ResultRef:
    """Writes the rows of a manifest in one transaction and returns its reference with the totals filled."""
    count, size, rows = 0, 0, 0
    counted, first = True, None
    async with catalog.connection() as connection, connection.transaction():
        await catalog.record([ref], connection)
        await connection.execute(_INSERT_MANIFEST, ref.ref_id, strategy)
        async for page in in_runs(_each(parts), _PARTS_A_STATEMENT):
            indexes, sizes = range(count, count + len(page)), [part.bytes_size for part in page]
            ref_ids = [part.ref_id for part in page]
            await connection.execute(_INSERT_PARTS, ref.ref_id, list(indexes), ref_ids, sizes)
            first = first or page[0]
            count += len(page)
            size += sum(sizes)
            counted = counted and all(part.rows is not None for part in page)
            rows += sum(part.rows or 0 for part in page)
        total = count if strategy is Strategy.APPEND else rows if counted else None
        await connection.execute(_CLOSE_MANIFEST, ref.ref_id, count, size, total)
        extra, preview = {**ref.extra, "parts": count}, ref.preview
        if strategy is Strategy.CONCAT and first is not None:  # a part looks like the whole
            preview = first.preview
            extra |= {"columns": first.extra["columns"]} if "columns" in first.extra else {}
        fields = (size, total, encode_json(extra).decode(), preview)
        await connection.execute(_FILL_REF, ref.ref_id, *fields)
    return ref.model_copy(update={"bytes_size": size, "rows": total, "preview": preview, "extra": extra})


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
    word = ref.extra.get("strategy", Strategy.APPEND)
    try:
        return Strategy(word)
    except ValueError:
        raise IntegrityError(f"{ref.ref} has the unknown strategy {word!r:.40}; run the step again") from None
