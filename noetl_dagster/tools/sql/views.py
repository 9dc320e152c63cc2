"""Results as views of DuckDB, read in place or from files that are written for it, and object storage for DuckDB."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper
from obstore.fsspec import FsspecStore

from noetl_dagster.errors import NoetlError
from noetl_dagster.playbook.templates.environment import sql_literal
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.storage.reading import ResultReader
from noetl_dagster.storage.tiers.objects import minio_store
from noetl_dagster.tools.base import as_result_ref
from noetl_dagster.tools.rows.arrow import arrow_column
from noetl_dagster.tools.rows.columns import column_type
from noetl_dagster.tools.sql.tables import listed, quoted
from noetl_dagster.values import RefusedValueError, admit

if TYPE_CHECKING:
    from noetl_dagster.storage.store import ResultStore


class NoRowsError(NoetlError):
    """A value has no rows."""


RowsSource: TypeAlias = "ResultRef | pa.Table | RowFiles"
"""The source of a view: Parquet that is read in place, a table in memory, or files that were written for DuckDB."""


async def source_of(value: Any, results: ResultStore, name: str, folder: Path) -> RowsSource | None:
    """Returns the source of a view of a value; None for a value without rows that is no reference.

    Args:
        value: rows, a mapping with ``rows``, or a reference.
        folder: for files of many stored rows; the source is valid as long as it exists.

    Raises:
        NoRowsError: the value of a reference has no rows.
    """
    reference = as_result_ref(value)
    if reference is not None:
        ref = reference if isinstance(reference, ResultRef) else await results.find(reference)
        if _in_place(ref):
            return ref
        if strategy_of(ref) not in (Strategy.CONCAT, Strategy.ROWS) or ref.kind is not RefKind.MANIFEST:
            return _table(await results.get(ref), name)
        files = await write_files(results, ref.rows_alone, folder, lambda rows: _table(rows, name))
        if files is None:
            raise NoRowsError(f"input {name!r} has no rows: a list of mappings is needed")
        return files
    rows = value.get("rows") if isinstance(value, Mapping) else value
    if isinstance(rows, pa.Table):
        return rows
    return _table(value, name) if _is_rows(rows) else None


def _in_place(ref: ResultRef) -> bool:
    return (
        ref.physical_uri.startswith(("/", "file://", "s3://", "gs://"))
        and ref.content_type == codec.PARQUET
        and ref.compression == "none"
        and ref.kind is not RefKind.MANIFEST
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(value: Any, name: str) -> pa.Table:
    if isinstance(value, pa.Table):
        return value
    columns: Iterable[str] = ()
    if isinstance(value, Mapping) and _is_rows(value.get("rows")):
        value, columns = value["rows"], value.get("columns") or ()
    if not _is_rows(value):
        raise NoRowsError(f"input {name!r} has no rows: a list of mappings is needed")
    try:
        rows = [admit(row, name) for row in value]
    except RefusedValueError as error:
        raise NoRowsError(str(error)) from error
    columns = dict.fromkeys([*columns, *(column for row in rows for column in row)])
    return pa.table({column: _column([row.get(column) for row in rows]) for column in columns})


def _column(values: list[Any]) -> pa.Array:
    """Returns one column; values of several types, or beyond 64 bits, become text."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return arrow_column("", values, pa.string())


class _GoogleFiles(ArrowFSWrapper):
    """Arrow's file system of Google's storage, with the scheme of its URIs."""

    protocol = "gs"


class _Buckets(FsspecStore):  # type: ignore[misc]
    """obstore's file system, which also finds patterns with their scheme, as DuckDB passes them."""

    async def _glob(self, path: str, **options: Any) -> Any:
        return await super()._glob(path.removeprefix(f"{self.protocol}://"), **options)


def mount_object_storage(connection: duckdb.DuckDBPyConnection, settings: Settings) -> None:
    """Makes ``s3://`` and ``gs://`` paths readable and writable without DuckDB's httpfs, which needs a download."""
    if settings.gcs_bucket is not None:
        filesystem, _ = locations.arrow_filesystem(settings, f"gs://{settings.gcs_bucket}/")
        connection.register_filesystem(_GoogleFiles(filesystem))
    if settings.minio_endpoint:
        store = minio_store(settings)  # kept by the process: a new one would read the system's certificates
        config = {name: value for name, value in store.config.items() if name != "bucket"}
        connection.register_filesystem(_Buckets("s3", config=config, client_options=store.client_options))


def create_view(connection: duckdb.DuckDBPyConnection, settings: Settings, name: str, source: RowsSource) -> None:
    """Creates a view; raises ``NoetlError`` if the files of a reference are missing."""
    view = f"CREATE TEMP VIEW {quoted(name)} AS"
    if isinstance(source, RowFiles):
        connection.execute(f"{view} {source.select}")
        return
    if not isinstance(source, ResultRef):
        connection.register(name, source)
        return
    uris = _files(settings, source)
    scheme, bucket, _ = locations.split_uri(source.physical_uri)
    # Arrow finds the credentials of the AWS or Google environment
    if scheme == "gs" or (scheme == "s3" and bucket != settings.minio_bucket):
        from pyarrow import dataset

        filesystem, _ = locations.arrow_filesystem(settings, uris[0])
        keys = [locations.arrow_filesystem_path(settings, uri) for uri in uris]
        connection.register(name, dataset.dataset(keys, format="parquet", filesystem=filesystem))
        return
    paths = [str(locations.local_path(settings, uri) or uri) for uri in uris]
    connection.execute(f"{view} SELECT * FROM read_parquet([{', '.join(map(sql_literal, paths))}])")


def _files(settings: Settings, ref: ResultRef) -> list[str]:
    """Returns the URIs of the Parquet files of a dataset, or of the one object."""
    if ref.kind is not RefKind.DATASET:
        return [ref.physical_uri]
    names = ref.extra.get("files") or ()
    folder = ref.physical_uri.rstrip("/")
    files = [f"{folder}/{name}" for name in names] or list(locations.file_sizes(settings, folder, ".parquet"))
    if not files:
        raise NoRowsError(f"no Parquet files are below {folder}")
    return files


FILE_ROWS = 20_000  # of a Parquet file that is made of JSON
LINES_BYTES = 3 * 512 * 1024  # of a file of JSON lines, about: each thread of DuckDB holds one
LINE_BYTES = 16 * 1024**2  # room for a line of JSON: DuckDB reserves no less, and uses as much as a file has
_SEARCH_BYTES = 64 * 1024  # that are searched for the end of a line at a time
MakeTable = Callable[[list[Any]], pa.Table]


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of rows on this machine.

    Attributes:
        columns: in order; with the types of DuckDB if the files are JSON lines, None if they are Parquet.
        largest: bytes of the largest file of lines; no line is longer.
    """

    paths: Sequence[Path]
    columns: Mapping[str, str | None]
    largest: int = 0

    @property
    def select(self) -> str:
        """The statement that returns their rows."""
        paths = f"[{', '.join(sql_literal(str(path)) for path in self.paths)}]"
        names = listed(self.columns)
        types = {name: kind for name, kind in self.columns.items() if kind is not None}
        if not types:
            return f"SELECT {names} FROM read_parquet({paths}, union_by_name = true)"
        fields = ", ".join(f"{quoted(name)}: {sql_literal(kind)}" for name, kind in types.items())
        options = f"format = 'newline_delimited', maximum_object_size = {max(LINE_BYTES, self.largest)}"
        return f"SELECT {names} FROM read_json({paths}, {options}, columns = {{{fields}}})"


async def write_files(results: ResultReader, ref: ResultRef, folder: Path, table: MakeTable) -> RowFiles | None:
    """Writes the rows of a stored list to files in a folder, one part in memory at a time; None without rows."""
    kinds = ref.extra.get("columns")
    types = {name: column_type(kind).duckdb for name, kind in (kinds or {}).items()}
    if ref.kind is RefKind.MANIFEST and kinds and all(types.values()):
        # the lines stay as they are, in files of a new size: a part may be too large for a file, or much smaller
        with closing(_LineFiles(folder, str(ref.ref_id))) as files:
            async for part in results.parts(ref):
                async for piece in results.stream(part):
                    await asyncio.to_thread(files.write, memoryview(piece))
        return RowFiles(files.paths, types, files.largest)
    columns: dict[str, pa.DataType] = dict.fromkeys(types, pa.null())
    paths: list[Path] = []
    async for batch in _tables(results, ref, table):
        for field in batch.schema:
            if columns.get(field.name, pa.null()) == pa.null():
                columns[field.name] = field.type
        paths.append(folder / f"{ref.ref_id}-{len(paths)}.parquet")
        batch = batch.select([field.name for field in batch.schema if field.type != pa.null()])
        if not batch.num_columns:  # one column, so that the rows are counted
            batch = pa.table({"": pa.nulls(batch.num_rows, pa.int32())})
        await asyncio.to_thread(pq.write_table, batch, paths[-1], compression="lz4")
    empty = {name: pa.array([], pa.int32()) for name, kind in columns.items() if kind == pa.null()}
    if empty:
        paths.append(folder / f"{ref.ref_id}-null.parquet")
        await asyncio.to_thread(pq.write_table, pa.table(empty), paths[-1])
    return RowFiles(paths, dict.fromkeys(columns)) if columns else None


class _LineFiles:
    """Files of whole lines, each ending with the line that fills it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._file: BinaryIO | None = None
        self.paths: list[Path] = []
        self.largest = 0

    def write(self, piece: memoryview) -> None:
        """Writes the next bytes, which may begin and end within a line."""
        while piece:
            if self._file is None:
                self.paths.append(self._folder / f"{self._name}-{len(self.paths)}.jsonl")
                self._file = self.paths[-1].open("wb")
            end = _line_end(piece, LINES_BYTES - self._file.tell())
            self._file.write(piece[:end])
            self.largest = max(self.largest, self._file.tell())
            if end is None:
                return
            self.close()
            piece = piece[end:]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line_end(piece: memoryview, start: int) -> int | None:
    """Returns the end of the first line that ends after ``start`` bytes; None if there is none."""
    for at in range(max(0, start - 1), len(piece), _SEARCH_BYTES):
        offset = bytes(piece[at : at + _SEARCH_BYTES]).find(b"\n")
        if offset >= 0:
            return at + offset + 1
    return None


async def _tables(results: ResultReader, ref: ResultRef, table: MakeTable) -> AsyncIterator[pa.Table]:
    rows: list[Any] = []
    async for batch in results.batches(ref):
        if not isinstance(batch, list):
            yield pa.Table.from_batches([batch])
            continue
        rows += batch
        if len(rows) >= FILE_ROWS:
            yield await asyncio.to_thread(table, rows)
            rows = []
    if rows:
        yield await asyncio.to_thread(table, rows)
