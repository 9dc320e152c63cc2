"""The formats of files of rows; importing them loads none of their libraries."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from noetl_dagster.errors import ToolError

CHUNK_ROWS = 50_000
"""Rows that make a chunk, however small they are: as objects, each takes several hundred bytes."""


class RowFormat(StrEnum):
    """A format of files of rows."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"


_ENDINGS = {
    ".parquet": RowFormat.PARQUET,
    ".jsonl": RowFormat.JSONL,
    ".ndjson": RowFormat.JSONL,
    ".json": RowFormat.JSON,
    ".csv": RowFormat.CSV,
}


def row_format(name: str | None, path: str) -> RowFormat:
    """Returns the format of a name, else of the path's ending.

    Raises:
        ToolError: neither determines it.
    """
    if name:
        try:
            return RowFormat({"ndjson": "jsonl"}.get(name.lower(), name.lower()))
        except ValueError:
            pass
    elif Path(path).suffix.lower() in _ENDINGS:
        return _ENDINGS[Path(path).suffix.lower()]
    known = ", ".join(RowFormat)
    raise ToolError(f"no format for {name or path!r}; write format: one of {known}", kind="schema")
