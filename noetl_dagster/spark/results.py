"""Stored results as a Spark data source, ``noetl_results``, which the executors read and write themselves.

Spark's jars contain no S3 client, and none is needed: executors use the package's own Python functions
(:mod:`noetl_dagster.storage.locations`) and pass Arrow batches to Spark.

Reading: JSON and text have one text column ``value``, with a row for each element of a list (or line); Parquet
has its own columns. Writing: Parquet below a folder of any object tier, partitioned like Hive.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import orjson
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from noetl_dagster.settings import Settings
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.codec import digest_of
from noetl_dagster.storage.compression import decompress
from noetl_dagster.values import encode_json

FORMAT = "noetl_results"
VALUE = "value"
BYTES_A_PARTITION = 32 * 1024 * 1024  # stored bytes per task, roughly; Spark's own default is four times that
AT_ONCE = 8  # objects that are transferred at once
WHOLE = 8 * 1024 * 1024  # bytes of the largest Parquet object that is fetched as a whole

_ROWS_A_BATCH = 4096
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One object to read.

    Attributes:
        base: the dataset's folder, for a file of one.
        depth: lists around a row: 1 for a list of rows, 2 for a list of such lists.
        sha256: of the stored bytes; None if unknown, as for some files of datasets.
    """

    uri: str
    content_type: str
    compression: str = "none"
    bytes_size: int = 0
    base: str = ""
    depth: int = 1
    sha256: str | None = None

    @property
    def is_whole(self) -> bool:
        """Reports whether it is fetched as a whole; large Parquet is opened instead, and read by row groups."""
        return self.content_type != codec.PARQUET or 0 < self.bytes_size <= WHOLE


def dump_parts(parts: list[StoredPart]) -> str:
    """Returns parts as the reader's option ``parts``."""
    return orjson.dumps([astuple(part) for part in parts]).decode()


class NoetlResults(DataSource):
    """The data source ``noetl_results``.

    Options for reading: ``parts`` (see :func:`dump_parts`) and ``tasks`` (their minimum, if there are enough parts);
    Parquet needs a schema. Options for writing: ``path`` and ``partition_by`` (a JSON list).
    """

    settings: ClassVar[Settings]

    @classmethod
    def name(cls) -> str:
        """Returns the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Returns the columns and their types, for readers that name none."""
        return f"{VALUE} STRING"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Returns a reader with the options."""
        parts = [StoredPart(*fields) for fields in orjson.loads(self.options.get("parts", "[]"))]
        return _ResultsReader(self.settings, parts, schema, int(self.options.get("tasks", "1")))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Returns a writer with the options."""
        partition_by = orjson.loads(self.options.get("partition_by", "[]"))
        return _Writer(self.settings, self.options["path"].rstrip("/"), partition_by)


@dataclass(eq=False)
class _ResultsReader(DataSourceReader):
    settings: Settings
    parts: list[StoredPart]
    spark_schema: StructType
    tasks: int

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(run) for run in divide_parts(self.parts, self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self.spark_schema, timezone="UTC")
        for part, stored in read_ahead(self.settings, partition.value, most=AT_ONCE + 1):
            if part.content_type == codec.PARQUET:
                yield from self._rows(part, stored, schema)
            else:
                assert stored is not None
                yield from _values(part, stored, schema)

    def _rows(self, part: StoredPart, stored: bytes | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        fixed = hive_values(part.uri, part.base)
        columns = [name for name in schema.names if name not in fixed]
        if stored is None:
            filesystem, path = locations.arrow_filesystem(self.settings, part.uri)
            opened = filesystem.open_input_file(path)
        else:
            opened = pa.BufferReader(stored)
        with opened as file:
            for batch in pq.ParquetFile(file).iter_batches(columns=columns):
                table = pa.Table.from_batches([batch])
                for name, value in fixed.items():
                    table = table.append_column(name, pa.array([value] * batch.num_rows, pa.string()))
                # Parquet may hold nanoseconds, Spark has microseconds
                yield from table.select(schema.names).cast(schema, safe=False).to_batches()


def divide_parts(parts: list[StoredPart], tasks: int) -> list[list[StoredPart]]:
    """Divides parts, in order, between ``tasks`` tasks of about the same size, or more tasks if they are large.

    The middle of a part determines its task. Empty tasks are left out, unless there are no parts.
    """
    total = sum(part.bytes_size for part in parts)
    number = max(tasks, -(-total // BYTES_A_PARTITION))
    runs: list[list[StoredPart]] = [[] for _ in range(number)]
    before = 0
    for part in parts:
        middle = before + part.bytes_size / 2
        runs[min(int(middle * number / total), number - 1) if total else 0].append(part)
        before += part.bytes_size
    return [run for run in runs if run] or [[]]


def verified_bytes(settings: Settings, part: StoredPart) -> bytes:
    """Returns the stored bytes of a part.

    Raises:
        IntegrityError: they differ from those that were stored.
        ReferenceNotAvailableError: nothing is stored there.
    """
    stored = locations.read_bytes(settings, part.uri)
    if part.sha256 is not None and (digest := digest_of(stored)) != part.sha256:
        raise locations.damaged(part.uri, digest, part.sha256)
    return stored


def read_ahead(
    settings: Settings, parts: Sequence[StoredPart], most: int, most_bytes: float = math.inf
) -> Generator[tuple[StoredPart, bytes | None], None, None]:
    """Yields parts in order, with their verified bytes if they are fetched whole; fetches the next ones meanwhile.

    Args:
        most: objects that wait in memory, at most.
        most_bytes: their stored bytes, at most.
    """
    coming: deque[tuple[StoredPart, Future[bytes] | None]] = deque()
    ahead = 0
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="noetl-read-ahead")
    try:
        for part in parts:
            while coming and (len(coming) >= most or ahead + part.bytes_size > most_bytes):
                first, future = coming.popleft()
                ahead -= first.bytes_size
                yield first, future.result() if future else None
            coming.append((part, threads.submit(verified_bytes, settings, part) if part.is_whole else None))
            ahead += part.bytes_size
        while coming:
            first, future = coming.popleft()
            yield first, future.result() if future else None
    finally:
        threads.shutdown(cancel_futures=True)


def _values(part: StoredPart, stored: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    plain = decompress(stored, part.compression)
    values = elements(bytes(plain), part.content_type, part.depth)
    for start in range(0, len(values), _ROWS_A_BATCH):
        column = pa.array(values[start : start + _ROWS_A_BATCH], pa.string())
        yield pa.RecordBatch.from_arrays([column], schema=schema)


def lines_of(part: StoredPart, stored: bytes) -> bytes:
    """Returns the elements of a stored JSON list or text, each followed by a line feed."""
    plain = bytes(decompress(stored, part.compression))
    if part.content_type == codec.JSON_LINES:
        return plain
    if not codec.is_json(part.content_type):
        return b"".join(line.encode() + b"\n" for line in plain.decode().splitlines())
    return b"".join(encode_json(item) + b"\n" for item in json_items(orjson.loads(plain), part.depth))


def elements(data: bytes, content_type: str, depth: int = 1) -> list[str]:
    """Returns the elements of a JSON list as JSON texts, the lines of a text, or a single value."""
    if codec.is_json(content_type):
        return json_elements(orjson.loads(data), depth)
    if content_type == codec.JSON_LINES:  # its texts may contain other line ends
        return data.decode().removesuffix("\n").split("\n") if data else []
    return data.decode().splitlines()


def json_elements(value: Any, depth: int = 1) -> list[str]:
    """Returns the elements of a list, and of the lists in it down to ``depth``, as JSON texts."""
    return [encode_json(item).decode() for item in json_items(value, depth)]


def json_items(value: Any, depth: int = 1) -> list[Any]:
    """Returns the elements of a list, and of the lists in it down to ``depth``; any other value is its only element."""
    items = value if isinstance(value, list) else [value]
    return [one for item in items for one in json_items(item, depth - 1)] if depth > 1 else items


def hive_values(uri: str, base: str) -> dict[str, str | None]:
    """Returns the values in the folder names between a dataset and one of its files: ``facility_id=F001``."""
    if not base:
        return {}
    folders = uri.removeprefix(base).strip("/").split("/")[:-1]
    pairs = (folder.partition("=") for folder in folders if "=" in folder)
    return {name: None if value == _NULL_PARTITION else unquote(value) for name, _, value in pairs}


@dataclass
class _Written(WriterCommitMessage):
    """URIs of the files that one task wrote."""

    files: list[str]


@dataclass(eq=False)
class _Writer(DataSourceArrowWriter):
    """Writes below a folder that is not read before it is registered; a failed job removes its files."""

    settings: Settings
    path: str
    partition_by: list[str]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Writes the batches of a task. Expects rows sorted by partition value; each change begins another file."""
        import pyarrow.parquet as pq

        filesystem, folder = locations.arrow_filesystem(self.settings, self.path)
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        files: list[str] = []
        open_name, writer = "", None
        for batch in iterator:
            for name, rows in self._split(pa.Table.from_batches([batch])):
                if writer is None or open_name != name:
                    if writer is not None:
                        writer.close()
                    file = f"{name}part-{task:05d}-{uuid.uuid4()}.parquet"
                    writer = pq.ParquetWriter(f"{folder}/{file}", rows.schema, filesystem=filesystem)
                    open_name = name
                    files.append(f"{self.path}/{file}")
                writer.write_table(rows)
        if writer is not None:
            writer.close()
        return _Written(files)

    def _split(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Divides a batch by partition folder, in the order of the rows."""
        if not self.partition_by:
            yield "", table
            return
        rest = [name for name in table.column_names if name not in self.partition_by]
        keys = table.select(self.partition_by)
        start = 0
        for end in [*_changes(keys), table.num_rows]:
            if end > start:
                folder = _hive_folder(keys.slice(start, 1).to_pylist()[0])
                yield folder, table.slice(start, end - start).select(rest)
            start = end

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [message for message in messages if isinstance(message, _Written)]
        locations.remove_objects(self.settings, [uri for message in written for uri in message.files])


def _changes(keys: pa.Table) -> list[int]:
    """Returns the positions at which a row's key differs from that of the row before it."""
    import pyarrow.compute as pc

    if keys.num_rows < 2:
        return []
    differs = pa.array([False] * (keys.num_rows - 1))
    for column in keys.columns:
        before, after = column.slice(0, keys.num_rows - 1), column.slice(1)
        same = pc.fill_null(pc.equal(before, after), False)
        both_null = pc.and_(pc.is_null(before), pc.is_null(after))
        differs = pc.or_(differs, pc.invert(pc.or_(same, both_null)))
    return [position + 1 for position, change in enumerate(differs.to_pylist()) if change]


def _hive_folder(key: dict[str, Any]) -> str:
    texts = [_NULL_PARTITION if value is None else quote(str(value), safe="") for value in key.values()]
    return "".join(f"{name}={text}/" for name, text in zip(key, texts, strict=True))
