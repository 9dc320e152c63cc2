"""Describes stored results as Dagster metadata: location, size, columns and a preview."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import orjson
from dagster import (
    AssetCheckEvaluation,
    AssetMaterialization,
    MetadataValue,
    OutputContext,
    TableColumn,
    TableColumnLineageMetadataValue,
    TableSchema,
    TableSchemaMetadataValue,
    deserialize_value,
    serialize_value,
)

from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier

_PREVIEW_ROWS = 5
_CELL = 60
_NOWHERE = frozenset({StoreTier.EVENTLOG, StoreTier.MEMORY})
"""Tiers whose URIs are of no use to readers: inside the reference, and in one process."""

STORAGE_KIND = "dagster/storage_kind"
SCHEMA = "dagster/column_schema"
LINEAGE = "dagster/column_lineage"


def storage_metadata(ref: ResultRef, *, partitioned: bool) -> dict[str, MetadataValue]:
    """Returns the known metadata of a value, or of one partition, under Dagster's own names if there are any."""
    metadata: dict[str, MetadataValue] = {
        STORAGE_KIND: MetadataValue.text(ref.store_tier.value),
        "bytes": MetadataValue.int(ref.bytes_size),
    }
    if ref.store_tier not in _NOWHERE:
        metadata["dagster/uri"] = MetadataValue.text(ref.physical_uri)
    if ref.sha256 is not None:
        metadata["sha256"] = MetadataValue.text(ref.sha256)
    if ref.rows is not None:
        name = "dagster/partition_row_count" if partitioned else "dagster/row_count"
        metadata[name] = MetadataValue.int(ref.rows)
    if columns := ref.extra.get("columns"):
        schema = TableSchema([TableColumn(name, str(kind)) for name, kind in columns.items()])
        metadata[SCHEMA] = MetadataValue.table_schema(schema)
    if ref.preview:
        metadata["preview"] = MetadataValue.md(_preview_table(ref.preview) or f"```\n{ref.preview}\n```")
    return redacted(metadata)


def with_origins(metadata: Mapping[str, Any], lineage: Any) -> dict[str, Any]:
    """Adds the origin of each column to its description: Dagster's open UI stores column lineage without showing it."""
    shown = metadata.get(SCHEMA)
    if not isinstance(shown, TableSchemaMetadataValue) or not isinstance(lineage, TableColumnLineageMetadataValue):
        return dict(metadata)
    columns = []
    for column in shown.schema.columns:
        deps = lineage.value.deps_by_column.get(column.name, ())
        origins = ", ".join(f"{dep.asset_key.to_user_string()}: {dep.column_name}" for dep in deps)
        columns.append(TableColumn(column.name, column.type, description=f"from {origins}" if origins else None))
    return {**metadata, SCHEMA: MetadataValue.table_schema(TableSchema(columns))}


Shown = TypeVar("Shown")


def redacted(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata without secrets."""
    return {SECRETS.redact(name): redacted_part(value) for name, value in metadata.items()}


def redacted_part(value: Shown) -> Shown:
    """Returns a value of metadata, or an event of Dagster, without secrets."""
    if not isinstance(value, MetadataValue | AssetMaterialization | AssetCheckEvaluation):
        return cast("Shown", SECRETS.redacted(value))
    stored = serialize_value(cast("Any", value))
    shown = SECRETS.redact(stored)
    return value if shown == stored else cast("Shown", deserialize_value(shown))


def is_partitioned(context: OutputContext) -> bool:
    """Reports whether an output is one or several partitions of an asset."""
    return context.has_asset_key and context.has_asset_partitions


def _preview_table(preview: str) -> str | None:
    """Returns a preview of rows (a JSON list of mappings, or JSON lines) as a Markdown table; None for others.

    Previews are cut at a byte limit, so their last row is often incomplete and left out.
    """
    texts = preview.split("\n")
    if preview.startswith("[{"):
        texts = [part.removesuffix("}") + "}" for part in preview[1:].rstrip("]").split("},")]
    rows = []
    for text in texts:
        with suppress(orjson.JSONDecodeError):
            row = orjson.loads(text.removeprefix(","))
            if row and isinstance(row, dict):
                rows.append(row)
    if not rows:
        return None
    del rows[_PREVIEW_ROWS:]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text[:_CELL].replace("|", "\\|").replace("\n", " ")
