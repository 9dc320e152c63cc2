"""Shows a chunk to the templates of the step that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.playbook.templates.views import DataView, LazyMapping, ReferenceCache
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.values import admit

ROW_COUNT = "row_count"
"""The number of ``rows`` of a stored mapping, noted beside its reference."""


class ChunkView(LazyMapping):
    """``chunk_index``, ``row_count``, ``has_more``, ``rows``, and ``data``: the result that the chunk is.

    In the log it has either ``data``, or the ``ref`` behind which that is.
    """

    __slots__ = ()

    def __init__(self, item: Mapping[str, Any], cache: ReferenceCache) -> None:
        values = {key: item[key] for key in ("chunk_index", "row_count", "has_more") if key in item}
        if "ref" in item:
            reference = ResultRef.model_validate(item["ref"])
            rows = reference.rows_alone if reference.around else reference
            values["data"] = DataView(None, reference=reference, cache=cache)
            values["rows"] = _ChunkRows(None, reference=rows, cache=cache)
        else:
            values["data"], values["rows"] = item.get("data"), rows_of(item.get("data"))
        super().__init__(values)


class _ChunkRows(DataView):
    """The rows of a stored chunk; whole references go on to tools that read them themselves."""

    __slots__ = ()

    def _value(self) -> Any:
        return rows_of(super()._value())


def rows_of(value: Any) -> Any:
    """Returns the rows of a value.

    They are a list itself, the rows of a table, ``rows`` of a mapping, and those of the body of an http result. None
    has no rows; anything else is one row.
    """
    if value is None or isinstance(value, list):
        return value or []
    if hasattr(value, "to_pylist"):
        return admit(value.to_pylist(), "row")
    if isinstance(value, Mapping) and isinstance(value.get("rows"), list):
        return value["rows"]
    if isinstance(value, Mapping) and "status_code" in value and "data" in value:
        return rows_of(value["data"])
    return [value]


def noted_rows(value: Any) -> dict[str, int]:
    """Returns the notes kept beside a value's reference, so that its rows are counted without fetching it."""
    rows = value.get("rows") if isinstance(value, Mapping) else None
    return {ROW_COUNT: len(rows)} if isinstance(rows, list) else {}


def row_count(envelope: Mapping[str, Any]) -> int | None:
    """Returns the number of rows that a result has as a chunk; None if only fetching it would tell."""
    if envelope.get("ref") is not None:
        reference = ResultRef.model_validate(envelope["ref"])
        return reference.rows if reference.rows is not None else reference.extra.get(ROW_COUNT)
    return len(rows_of(envelope.get("data")))
