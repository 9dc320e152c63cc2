"""Encodes and decodes values: content types, previews, selected fields and checksums."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from noetl_dagster.errors import StorageError
from noetl_dagster.process.redaction import LONGEST, SECRETS
from noetl_dagster.storage.compression import Compression, compress, decompress, one_format
from noetl_dagster.storage.exact_json import loads_exact
from noetl_dagster.storage.tiers.base import Bytes
from noetl_dagster.values import RefusedValueError, admit, encode_json, is_table, legible

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "application/json"
BINARY = "application/octet-stream"
TEXT = "text/plain"
PARQUET = "application/vnd.apache.parquet"
JSON_LINES = "application/jsonl"

JSON_OF_OTHERS = "application/json; charset=utf-8"
"""JSON that another program has written: its numbers are examined when it is read."""

EXTENSIONS = {
    JSON: ".json",
    JSON_OF_OTHERS: ".json",
    BINARY: ".bin",
    TEXT: ".txt",
    PARQUET: ".parquet",
    JSON_LINES: ".jsonl",
}

_NOTHING = object()

THREAD_ABOVE = 1024 * 1024
"""Bytes from which hashing is worth a separate thread."""

_BLOCK = 256 * 1024
"""Bytes of JSON lines that are parsed at a time."""

_LINES = 256
"""Rows whose lines are joined at a time: each alone would keep kilobytes of its buffer allocated."""

_IN_PIECES = 1024 * 1024
"""Bytes from which an array is parsed line by line: orjson needs up to 17 times as much memory meanwhile."""

_NEXT_LINE = re.compile(rb",\n")
_OPENS, _CLOSES = b"[]"


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Rows that are already JSON, each followed by a line feed, and their columns' types as the source names them."""

    data: Bytes | bytearray
    rows: int
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as it is stored.

    Attributes:
        rows: length of a list or a table; None for anything else.
        extra: facts of the format, for example a table's columns.
    """

    data: Bytes
    content_type: str
    rows: int | None
    preview: str | None
    extra: dict[str, Any]


def admitted(value: Any, place: str = "result") -> Any:
    """Returns a result in its stored form: bytes, JSON lines, an Arrow table, or a value as :func:`admit` returns it.

    Raises:
        RefusedValueError: the value, or a part of it, has no such form.
    """
    if isinstance(value, (bytes, bytearray, memoryview, JsonLines)):
        return value
    table = as_arrow_table(value, place)
    return admit(value, place) if table is None else table


def _in_lines(value: Any) -> bytes:
    """Returns a value as JSON; each line of a list contains some hundred items."""
    if not isinstance(value, list) or len(value) <= _LINES:
        return encode_json(value)
    parts = (value[at : at + _LINES] for at in range(0, len(value), _LINES))
    return b"[" + b",\n".join(encode_json(part)[1:-1] for part in parts) + b"]"


def json_lines(rows: Iterable[Any]) -> bytes:
    """Returns admitted rows as JSON, one per line."""
    pieces, rest = [], iter(rows)
    while some := [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in islice(rest, _LINES)]:
        pieces.append(b"".join(some))
    return b"".join(pieces)


def rows_of_lines(data: Bytes) -> Iterator[list[Any]]:
    """Yields the rows of :func:`json_lines`, a block at a time; raises as :func:`decode`."""
    text, start = memoryview(data), 0
    while start < len(text):
        block = bytes(text[start : start + _BLOCK])
        end = block.rfind(b"\n") + 1
        while end == 0:  # a row that is longer than a block
            if start + len(block) >= len(text):
                end = len(block)
                break
            block = bytes(text[start : start + 2 * len(block)])
            end = block.rfind(b"\n") + 1
        with one_format(JSON_LINES):
            rows = orjson.loads(b"[" + block[:end].rstrip(b"\n").replace(b"\n", b",") + b"]")
        yield rows
        start += end


def _parsed(text: Bytes) -> Any:
    """Parses a JSON value; an array whose lines are whole items, as :func:`_in_lines` writes it, line by line."""
    view = memoryview(text)
    if len(view) >= _IN_PIECES and view[0] == _OPENS and view[-1] == _CLOSES:
        items, start = list[Any](), 1
        ends = [*(match.start() for match in _NEXT_LINE.finditer(view)), len(view) - 1]
        try:
            for end in ends:
                line = orjson.loads(b"".join((b"[", view[start:end], b"]")))
                if not line:
                    break
                items += line
                start = end + 2
            else:
                return items
        except orjson.JSONDecodeError:
            pass  # lines of another program
    return orjson.loads(view)


PREVIEW_BYTES = 1024
"""Largest preview of a result: its row in the event log stays small."""


def encode(
    value: Any,
    *,
    content_type: str | None = None,
    compression: Compression = Compression.NONE,
) -> Encoded:
    """Returns a value as bytes, with everything that a reference records about them.

    bytes stay bytes; text with a ``text/*`` content type stays text; pandas and Arrow tables become
    Parquet; :class:`JsonLines` stay as they are; everything else becomes JSON.
    """
    data: Bytes
    rows, extra = None, {}
    if isinstance(value, (bytes, bytearray, memoryview)):
        data, kind = value if isinstance(value, bytes) else memoryview(value), BINARY
        preview = clip(data, PREVIEW_BYTES) if is_readable(content_type or kind) else None
    elif (table := as_arrow_table(value)) is not None:
        data, kind, rows = table_to_parquet(table), PARQUET, table.num_rows
        preview = _table_preview(table, PREVIEW_BYTES)
        extra = {"columns": {field.name: str(field.type) for field in table.schema}}
    else:
        if isinstance(value, str) and content_type is not None and not is_json(content_type):
            data, kind = value.encode(), TEXT
        elif isinstance(value, JsonLines):
            data, kind, rows = memoryview(value.data), JSON_LINES, value.rows
            extra = {} if value.columns is None else {"columns": dict(value.columns)}
        else:
            data, kind = _in_lines(value), JSON
            rows = len(value) if isinstance(value, (list, tuple)) else None
        preview = clip(data, PREVIEW_BYTES)
    return Encoded(compress(data, compression), content_type or kind, rows, preview, extra)


def decode(data: Bytes, content_type: str, compression: str = "none") -> Any:
    """Returns the value of stored bytes.

    JSON becomes an object, JSON lines a list, Parquet an Arrow table, text ``str``, anything else ``bytes``.

    Raises:
        FormatError: the bytes are damaged, or have another format.
    """
    plain = decompress(data, compression)
    with one_format(content_type):
        if is_json(content_type):
            return _parsed(plain) if content_type == JSON else loads_exact(bytes(plain))
        if content_type == JSON_LINES:
            return [row for rows in rows_of_lines(plain) for row in rows]
        if content_type == PARQUET:
            import pyarrow as pa
            import pyarrow.parquet as pq

            return pq.read_table(pa.BufferReader(plain))
        if content_type.startswith("text/"):
            return bytes(plain).decode()
        return bytes(plain)


def is_json(content_type: str) -> bool:
    """Reports whether a content type is JSON in one of its spellings."""
    kind = content_type.partition(";")[0].strip()
    return kind == JSON or kind.endswith("+json")


def is_readable(content_type: str) -> bool:
    """Reports whether people can read bytes of a content type: text or JSON."""
    return content_type.startswith("text/") or is_json(content_type)


def as_arrow_table(value: Any, place: str = "the table") -> pa.Table | None:
    """Returns a pandas, polars or Arrow table as an Arrow table; None for other values.

    The index of a pandas frame becomes a column, unless it only numbers the rows. Most results are no tables, so Arrow
    is imported only if the type's name is that of one.

    Raises:
        RefusedValueError: a column has values of several types, or the name of another one.
    """
    if not is_table(value):
        return None
    import pyarrow as pa

    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if hasattr(value, "to_arrow"):
        return value.to_arrow()  # polars
    try:
        return pa.Table.from_pandas(value)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        reason = "; ".join(map(str, error.args)) or type(error).__name__
        raise RefusedValueError(
            place, f"is a frame that Arrow cannot hold: {reason}; give each column one type and a name of its own"
        ) from None


def table_to_parquet(table: pa.Table) -> memoryview:
    """Returns a table as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table, sink)
    except (pa.ArrowException, ValueError) as error:
        raise StorageError(f"the table cannot be stored as Parquet: {error}; convert that column") from error
    return memoryview(sink.getvalue()).cast("B")


def _table_preview(table: pa.Table, limit: int) -> str:
    """Returns the first rows as JSON lines."""
    lines = (orjson.dumps(legible(row)) for row in table.slice(0, 5).to_pylist())
    return clip(b"\n".join(lines), limit)


def clip(data: Bytes | bytearray, limit: int) -> str:
    """Returns at most ``limit`` bytes of the beginning, without secrets, half characters and NULs.

    PostgreSQL refuses NULs.
    """
    head = SECRETS.redact_bytes(bytes(data[: limit + LONGEST]))
    return head[:limit].decode("utf-8", errors="ignore").replace("\x00", "")


def select_fields(value: Any, paths: Sequence[str], limit: int) -> dict[str, Any]:
    """Returns the fields to copy next to a reference, by dotted path: ``{"paging.page": 3}``.

    List positions are numbers (``rows.0.id``). Missing fields and those of more than ``limit`` bytes are left out;
    readers fetch the latter. The last word of a path is an alias of it, unless the value itself has a field of that
    name, which is then copied as well.
    """
    fields = {path: _at(value, path.split(".")) for path in paths}
    for path in paths:
        own = _own(value, path.rpartition(".")[2])
        if own is not _NOTHING and byte_length(own) > limit:
            fields.pop(path, None)
        elif own is not _NOTHING:
            fields.setdefault(path.rpartition(".")[2], own)
    return {path: field for path, field in fields.items() if field is not _NOTHING and byte_length(field) <= limit}


def _at(value: Any, parts: Sequence[str]) -> Any:
    """Returns the value at a path. A first ``data`` may mean the value itself, as in ``{{ step.data.count }}``."""
    here = value
    for position, part in enumerate(parts):
        if isinstance(here, Mapping) and part in here:
            here = here[part]
        elif isinstance(here, Sequence) and not isinstance(here, (str, bytes)) and _position(part, here):
            here = here[int(part)]
        elif position > 0 or part != "data":
            return _NOTHING
    return here


def _own(value: Any, key: str) -> Any:
    """Returns the field that templates find in a value under a bare name."""
    inner = value.get("data") if isinstance(value, Mapping) else None
    layers = (layer for layer in (value, inner) if isinstance(layer, Mapping))
    return next((layer[key] for layer in layers if key in layer), _NOTHING)


def _position(part: str, items: Sequence[Any]) -> bool:
    return part.lstrip("-").isdigit() and -len(items) <= int(part) < len(items)


def byte_length(value: Any) -> int:
    """Returns the bytes of a value as JSON, for the inline limit."""
    if isinstance(value, bytes):
        return len(value)
    return len(encode_json(value))


def digest_of(data: Bytes) -> str:
    """Returns the sha256 of bytes, as hex digits."""
    return hashlib.sha256(data).hexdigest()


class RunningDigest:
    """A sha256 that is one chunk behind: each chunk is hashed in a thread while the next one is moved."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._running: asyncio.Future[None] | None = None

    async def add(self, chunk: Bytes) -> None:
        """Adds a chunk; waits only for the one before it."""
        await self._hash_pending()
        if len(chunk) < THREAD_ABOVE:
            self._digest.update(chunk)
        else:
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(None, self._digest.update, chunk)

    async def hexdigest(self) -> str:
        """Returns the digest of all chunks."""
        await self._hash_pending()
        return self._digest.hexdigest()

    async def _hash_pending(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running
