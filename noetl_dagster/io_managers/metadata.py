"""Describes stored results as Dagster metadata: location, size, columns and a preview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from dagster import (
    MetadataValue,
    OutputContext,
    TableColumn,
    TableColumnDep,
    TableColumnLineageMetadataValue,
    TableSchema,
    TableSchemaMetadataValue,
)

from noetl_dagster.settings import StoreTier

_PREVIEW_ROWS = 5
_CELL = 60
_NOWHERE = frozenset({StoreTier.EVENTLOG, StoreTier.MEMORY})
"""Tiers whose URIs are of no use to readers: inside the reference, and in one process."""

STORAGE_KIND = "dagster/storage_kind"
SCHEMA = "dagster/column_schema"
LINEAGE = "dagster/column_lineage"


def storage_metadata(
    *,
    uri: str,
    tier: StoreTier,
    bytes_size: int,
    sha256: str | None,
    rows: int | None,
    columns: Mapping[str, str] | None,
    preview: str | None,
    partitioned: bool = False,
) -> dict[str, MetadataValue]:
    """Returns the known metadata of one stored value, under Dagster's own names if there are any.

    Args:
        partitioned: the value is one partition of an asset, so its rows are not the whole asset's.
    """
    metadata: dict[str, MetadataValue] = {
        STORAGE_KIND: MetadataValue.text(tier.value),
        "bytes": MetadataValue.int(bytes_size),
    }
    if tier not in _NOWHERE:
        metadata["dagster/uri"] = MetadataValue.text(uri)
    if sha256 is not None:
        metadata["sha256"] = MetadataValue.text(sha256)
    if rows is not None:
        name = "dagster/partition_row_count" if partitioned else "dagster/row_count"
        metadata[name] = MetadataValue.int(rows)
    if columns:
        schema = TableSchema([TableColumn(name, str(kind)) for name, kind in columns.items()])
        metadata[SCHEMA] = MetadataValue.table_schema(schema)
    if preview:
        metadata["preview"] = MetadataValue.md(preview_table(preview) or f"```\n{preview}\n```")
    return metadata


def with_origins(metadata: Mapping[str, Any], lineage: Any) -> dict[str, Any]:
    """Adds the origin of each column to its description: Dagster's open UI stores column lineage without showing it.

    Args:
        lineage: ``dagster/column_lineage``, as a metadata value; None: unknown.
    """
    shown = metadata.get(SCHEMA)
    if not isinstance(shown, TableSchemaMetadataValue) or not isinstance(
        lineage, TableColumnLineageMetadataValue
    ):
        return dict(metadata)
    deps = lineage.value.deps_by_column
    columns = [
        TableColumn(column.name, column.type, description=_origin(deps.get(column.name, ())))
        for column in shown.schema.columns
    ]
    return {**metadata, SCHEMA: MetadataValue.table_schema(TableSchema(columns))}


def _origin(deps: Sequence[TableColumnDep]) -> str | None:
    origins = [f"{dep.asset_key.to_user_string()}: {dep.column_name}" for dep in deps]
    return f"from {', '.join(origins)}" if origins else None


def is_partitioned(context: OutputContext) -> bool:
    """Reports whether an output is one or several partitions of an asset."""
    return context.has_asset_key and context.has_asset_partitions


def preview_table(preview: str) -> str | None:
    """Returns a preview of rows (a JSON list of mappings, or JSON lines) as a Markdown table; None for others.

    Previews are cut at a byte limit, so their last row is often incomplete and left out.
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
