"""``kind: duckdb``: SQL over files, results by reference and lists, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from obstore.fsspec import FsspecStore

from noetl_dagster.errors import NoetlError, ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_literal
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import locations
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.references import as_result_ref
from noetl_dagster.tools.rows.jsonable import NotJsonableError, to_jsonable
from noetl_dagster.tools.sql.prepare import prepare_statements
from noetl_dagster.tools.sql.statements import BoundStatement

PARQUET = "application/vnd.apache.parquet"
IN_MEMORY = ":memory:"


class DuckdbTool(Tool):
    """Runs SQL in DuckDB.

    Input: ``command`` (one or more statements) or ``script``; ``params`` as for postgres; ``database`` (a
    file, relative to the playbook's folder; default: in memory, for this call). Each input that is a result's
    reference (``rows: "{{ load.ref }}"``) or a list of mappings is a view of that name; Parquet on the shared
    volume and in object storage is read in place. ``read_parquet('s3://bucket/key')`` reads the minio tier,
    ``read_parquet('gs://bucket/key')`` the gcs tier.

    Output: as postgres: ``command_0``, ... and the last one's ``rows``, ``row_count``, ``columns``. With
    ``as: table`` the last statement's rows as one Arrow table, which the result store keeps as Parquet.

    Raises ``ToolError`` of kind ``duckdb``, retryable when another process holds the database file.
    """

    kind = "duckdb"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        statements = await prepare_statements(call, box)
        views = await _views(call, box)
        database = str(call.config.get("database") or IN_MEMORY)
        path = database if database == IN_MEMORY else str(Path(call.folder, database))
        try:
            connection = await asyncio.to_thread(duckdb.connect, path)
            try:
                job = asyncio.to_thread(_run, connection, box.settings, statements, views, _as_table(call))
                return ToolResult(data=await _interruptible(job, connection))
            finally:
                await asyncio.to_thread(connection.close)
        except (duckdb.Error, NotJsonableError, OSError) as error:
            text = box.credentials.redact(f"duckdb in step {call.step}: {type(error).__name__}: {error}")
            locked = isinstance(error, duckdb.IOException) and "lock" in str(error).lower()
            raise ToolError(text, kind=self.kind, retryable=locked, code=type(error).__name__) from None


async def _interruptible(job: Any, connection: duckdb.DuckDBPyConnection) -> Any:
    """Awaits a thread; on cancellation DuckDB stops its query, and only then is the connection free."""
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        connection.interrupt()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _as_table(call: ToolCall) -> bool:
    return str(call.config.get("as") or "rows").lower() in ("table", "arrow", "parquet")


async def _views(call: ToolCall, box: Toolbox) -> dict[str, Any]:
    """Per view a ``ResultRef`` that is read in place, or an Arrow table."""
    found: dict[str, Any] = {}
    for name, value in call.input.items():
        reference = as_result_ref(value)
        if reference is not None:
            ref = reference if isinstance(reference, ResultRef) else await box.results.find(reference)
            found[name] = ref if _in_place(ref) else _table(await box.results.get(ref), name)
        elif isinstance(value, pa.Table) or _is_rows(value):
            found[name] = _table(value, name)
    return found


def _in_place(ref: ResultRef) -> bool:
    files = ref.physical_uri.startswith(("/", "file://", "s3://", "gs://"))
    return (
        files
        and ref.content_type == PARQUET
        and ref.compression == "none"
        and ref.kind is not RefKind.MANIFEST
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(value: Any, name: str) -> pa.Table:
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, Mapping) and _is_rows(value.get("rows")):
        value = value["rows"]
    if not _is_rows(value):
        raise ToolError(f"duckdb: input {name!r} has no rows: a list of mappings is needed", kind="duckdb")
    return pa.Table.from_pylist([to_jsonable(row, name) for row in value])


def _run(
    connection: duckdb.DuckDBPyConnection,
    settings: Settings,
    statements: Sequence[BoundStatement],
    views: Mapping[str, Any],
    as_table: bool,
) -> Any:
    mount_object_storage(connection, settings)
    for name, source in views.items():
        _create_view(connection, settings, name, source)
    results: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for index, statement in enumerate(statements):
        values = list(statement.values) or None
        if as_table and index == len(statements) - 1:
            relation = connection.sql(statement.text, params=values)
            if relation is None:
                raise ToolError("duckdb: 'as: table' needs a last statement that returns rows", kind="duckdb")
            return relation.to_arrow_table()
        cursor = connection.execute(statement.text, values)
        result = _result(cursor, statement.text)
        results[f"command_{index}"] = result
        if "rows" in result or "rows" not in last:
            last = result
    return results | {key: value for key, value in last.items() if key != "status"}


def _result(cursor: Any, text: str) -> dict[str, Any]:
    columns = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchall() if columns else []
    if not columns or (columns in (["Count"], ["Success"]) and not _is_query(text)):
        count = int(rows[0][0]) if columns == ["Count"] and rows else 0
        return {"status": "ok", "row_count": count}
    mapped = [dict(zip(columns, map(to_jsonable, row), strict=True)) for row in rows]
    return {"status": "ok", "rows": mapped, "row_count": len(mapped), "columns": columns}


def _is_query(text: str) -> bool:
    return text.lstrip("( \n\t").lower().startswith(("select", "with", "from", "values", "table"))


class _GoogleFiles(ArrowFSWrapper):
    """Arrow's file system of Google's storage, by the name that URIs have."""

    protocol = "gs"


def mount_object_storage(connection: duckdb.DuckDBPyConnection, settings: Settings) -> None:
    """Makes ``s3://`` and ``gs://`` paths readable and writable without DuckDB's httpfs, which needs a download."""
    if settings.gcs_bucket is not None:
        filesystem, _ = locations.arrow_filesystem(settings, f"gs://{settings.gcs_bucket}/")
        connection.register_filesystem(_GoogleFiles(filesystem))
    if settings.minio_endpoint is None:
        return
    store = FsspecStore(
        "s3",
        config={
            "endpoint": settings.minio_endpoint,
            "access_key_id": settings.minio_access_key,
            "secret_access_key": settings.minio_secret_key.get_secret_value(),
            "region": settings.minio_region,
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": settings.minio_endpoint.startswith("http://")},
    )
    connection.register_filesystem(store)


def _create_view(connection: duckdb.DuckDBPyConnection, settings: Settings, name: str, source: Any) -> None:
    if not isinstance(source, ResultRef):
        connection.register(name, source)
        return
    try:
        uris = _files(settings, source)
        scheme, bucket, _ = locations.split_uri(source.physical_uri)
        # credentials of the AWS or the Google environment, which Arrow finds
        if scheme == "gs" or (scheme == "s3" and bucket != settings.minio_bucket):
            connection.register(name, _arrow_dataset(settings, uris))
            return
        paths = [str(locations.local_path(settings, uri) or uri) for uri in uris]
    except NoetlError as error:
        raise ToolError(f"duckdb: input {name!r}: {error}", kind="duckdb") from None
    quoted = '"' + name.replace('"', '""') + '"'
    listed = ", ".join(map(sql_literal, paths))
    connection.execute(f"CREATE TEMP VIEW {quoted} AS SELECT * FROM read_parquet([{listed}])")


def _files(settings: Settings, ref: ResultRef) -> list[str]:
    """URIs of the Parquet files of a dataset, or of the one object."""
    if ref.kind is not RefKind.DATASET:
        return [ref.physical_uri]
    names = ref.extra.get("files") or ()
    folder = ref.physical_uri.rstrip("/")
    found = [f"{folder}/{name}" for name in names] or locations.list_files(settings, folder, ".parquet")
    if not found:
        raise ToolError(f"duckdb: no Parquet files are below {folder}", kind="duckdb")
    return found


def _arrow_dataset(settings: Settings, uris: Sequence[str]) -> Any:
    from pyarrow import dataset as arrow_dataset

    filesystem, _ = locations.arrow_filesystem(settings, uris[0])
    paths = [locations.arrow_filesystem_path(settings, uri) for uri in uris]
    return arrow_dataset.dataset(paths, format="parquet", filesystem=filesystem)
