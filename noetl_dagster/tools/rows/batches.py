"""The rows of a result, all at once or a batch at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage.codec import JSON_LINES, PARQUET
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.values import is_table

if TYPE_CHECKING:
    from noetl_dagster.storage.store import ResultStore


def rows_of(value: Any) -> list[Mapping[str, Any]]:
    """Returns the rows inside a result.

    These are the body of an http result; the list of mappings under ``rows``, ``data`` or ``items``; the mapping itself
    as one row; the rows of a table. Any other value becomes a row ``{value: ...}``.
    """
    if is_table(value):
        value = value.to_arrow() if hasattr(value, "to_arrow") else value  # polars
        return list(value.to_dict("records") if hasattr(value, "to_dict") else value.to_pylist())
    if isinstance(value, Mapping):
        if "status_code" in value and "data" in value:
            return rows_of(value["data"])
        for name in ("rows", "data", "items"):
            inner = value.get(name)
            if isinstance(inner, list) and all(isinstance(item, Mapping) for item in inner):
                return _in_order(inner, value.get("columns")) if name == "rows" else inner
        return [value]
    if isinstance(value, list | tuple):
        # the exact type first: a check of an abstract class takes as long as the rest
        return [item if type(item) is dict or isinstance(item, Mapping) else {"value": item} for item in value]
    return [] if value is None else [{"value": value}]


def _in_order(rows: list[Mapping[str, Any]], columns: Any) -> list[Mapping[str, Any]]:
    """Returns rows of SQL with their columns in the order of the statement, which stored mappings do not keep."""
    if not rows or not isinstance(columns, list) or list(rows[0]) == columns or rows[0].keys() != set(columns):
        return rows
    return [{name: row[name] for name in columns} if row.keys() == rows[0].keys() else row for row in rows]


ROWS_AT_ONCE = 1_000  # of a batch at least, except the last one


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result that stays in its store.

    Attributes:
        parts: reads its rows, in lists or Arrow batches.
        whole: reads the value that contains them.
    """

    parts: Callable[[], AsyncIterator[Any]]
    whole: Callable[[], Awaitable[Any]]


async def value_or_rows(ref: ResultRef | str, results: ResultStore, chunk_bytes: int) -> Any:
    """Returns the value of a reference, or a reader of its rows when they are more than ``chunk_bytes``."""
    rows = _listed(ref) if isinstance(ref, ResultRef) else None
    if rows is None or (rows.kind is RefKind.OBJECT and rows.bytes_size <= chunk_bytes):
        return await results.get(ref)
    return StoredResult(lambda: results.batches(rows), lambda: results.get(ref))


def _listed(ref: ResultRef) -> ResultRef | None:
    """Returns the reference from which rows can be read in batches; None if only the whole value can be read."""
    if (around := ref.around) is not None:
        place = "data" if "status_code" in around.fields else "rows"
        return ref.rows_alone if place in around.at else None
    if ref.kind is RefKind.MANIFEST:
        return ref if strategy_of(ref) in (Strategy.CONCAT, Strategy.APPEND) else None
    is_list = ref.kind is RefKind.DATASET or ref.content_type in (JSON_LINES, PARQUET)
    return ref if is_list else None


async def batches_of(result: Any) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Yields the rows that :func:`rows_of` finds: those of a :class:`StoredResult` batch by batch, others together.

    No batch is empty. Every call yields the same batches.
    """
    if not isinstance(result, StoredResult):
        if rows := rows_of(result):
            yield rows
        return
    waiting: list[Mapping[str, Any]] = []
    async for part in result.parts():
        waiting += rows_of(part)
        if len(waiting) >= ROWS_AT_ONCE:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


async def has_rows(result: Any) -> bool:
    """Returns whether a result has a row."""
    return await anext(batches_of(result), None) is not None
