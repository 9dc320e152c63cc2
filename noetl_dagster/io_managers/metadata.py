"""Stored results as Dagster metadata: where, how large, what columns, and a first look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from dagster import MetadataValue, TableColumn, TableSchema

_PREVIEW_ROWS = 5
_CELL = 60


def storage_metadata(
    *,
    uri: str,
    tier: str,
    bytes_size: int,
    sha256: str | None,
    rows: int | None,
    columns: Mapping[str, str] | None,
    preview: str | None,
) -> dict[str, MetadataValue]:
    """Metadata of one stored value; what is not known is left out."""
    metadata: dict[str, MetadataValue] = {
        "uri": MetadataValue.path(uri if len(uri) < 500 else uri[:100] + "..."),
        "tier": MetadataValue.text(tier),
        "bytes": MetadataValue.int(bytes_size),
    }
    if sha256 is not None:
        metadata["sha256"] = MetadataValue.text(sha256)
    if rows is not None:
        metadata["dagster/row_count"] = MetadataValue.int(rows)
    if columns:
        schema = TableSchema([TableColumn(name, str(kind)) for name, kind in columns.items()])
        metadata["dagster/column_schema"] = MetadataValue.table_schema(schema)
    if preview:
        metadata["preview"] = MetadataValue.md(preview_table(preview) or f"```\n{preview}\n```")
    return metadata


def preview_table(preview: str) -> str | None:
    """A preview of rows (a JSON list of mappings, or JSON lines) as a Markdown table; None when it is none.

    A preview is cut at a byte limit, so its last row is often broken and left out.
    """
    rows = [row for row in map(_row, _row_texts(preview)) if row][:_PREVIEW_ROWS]
    if not rows:
        return None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _row_texts(preview: str) -> list[str]:
    if preview.startswith("[{"):
        return [part if part.endswith("}") else part + "}" for part in preview[1:].rstrip("]").split("},")]
    return preview.split("\n")


def _row(text: str) -> dict[str, Any] | None:
    try:
        row = orjson.loads(text.removeprefix(","))
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text[:_CELL].replace("|", "\\|").replace("\n", " ")
