"""``kind: artifact`` (also ``result`` and ``resolve``): values by reference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError, ToolError
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.playbook.templates.rendering import with_references
from noetl_dagster.playbook.templates.views import ResultView
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec, locations
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.tools.base import Chunk, Tool, Toolbox, ToolCall, ToolResult, as_result_ref
from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.rows.cutters import CUT_FORMATS, RECORD_BYTES, begins_array, cutter_for
from noetl_dagster.tools.rows.formats import RowFormat

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Choice = TypeVar("Choice", bound=StrEnum)

_CONTENT_TYPES = {".json": "application/json", ".parquet": "application/vnd.apache.parquet"}

_ROW_ENDINGS = {
    ".csv": RowFormat.CSV,
    ".json": RowFormat.JSON,
    ".jsonl": RowFormat.JSONL,
    ".ndjson": RowFormat.JSONL,
    ".parquet": RowFormat.PARQUET,
}


class ArtifactAction(StrEnum):
    GET = "get"
    PUT = "put"


class ArtifactTool(Tool):
    """Stores a value, or finds one that is stored.

    Input: ``action`` (``get`` or ``put``; default ``put`` where ``value`` is given, else ``get``).
    ``put``: ``value``, ``name`` (default: the task's), ``store`` (a tier), ``ttl`` seconds, ``compress``
    (none, gzip, lz4), ``content_type``. ``get``: ``ref`` (a reference, its logical name, or the name of a step),
    ``step`` of this execution, with ``name`` where it stored several, or ``uri``, the physical address of an object
    in a mount or in the minio tier.

    Output: the value by reference: ``output.ref`` is the reference, and touching the result fetches it. With
    ``uri``, and of a step whose result was stored nowhere, the value itself: parsed JSON, a Parquet table, text, or
    bytes. With ``format`` (jsonl, csv, json) it is the list of the rows at ``uri``, and so it is of files that end in
    .jsonl and .csv where a step takes the chunks. Rows, JSON arrays and Parquet tables come chunk by chunk, and are
    given by reference where they are more than one.

    Raises ``ToolError``, with code ``REFERENCE_NOT_AVAILABLE`` when there is none.
    """

    kind = "artifact"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        action = _action(call)
        uri = call.config.get("uri")
        try:
            if uri and action is ArtifactAction.GET and as_result_ref(uri) is None:
                if (format := await _row_format(call, box, str(uri))) is not None:
                    return await file_rows(str(uri), format, call, box)
                with reading(str(uri)):
                    return ToolResult(data=await asyncio.to_thread(_read, box, str(uri)))
            found = await (_put(call, box) if action is ArtifactAction.PUT else _get(call, box))
        except StorageError as error:
            code = getattr(error, "code", None)
            raise ToolError(
                f"artifact {action} in step {call.step}: {error}", kind=error.kind, code=code
            ) from None
        if not isinstance(found, ResultRef):
            return ToolResult(data=found)
        if action is ArtifactAction.GET:
            await tell_stored(found, call, box)
        return ToolResult(ref=found)


def _action(call: ToolCall) -> ArtifactAction:
    given = call.config.get("action")
    if given is None:
        return ArtifactAction.PUT if "value" in call.config else ArtifactAction.GET
    return _choice(call, "action", given, ArtifactAction)


async def _row_format(call: ToolCall, box: Toolbox, uri: str) -> RowFormat | None:
    """The format of a file that is read chunk by chunk."""
    if not uri.startswith(("s3://", "gs://")) and locations.local_path(box.settings, uri) is None:
        return None
    given = str(call.config.get("format") or "").lower()
    format = _ROW_ENDINGS.get(f".{given}" if given else PurePosixPath(uri).suffix.lower())
    wanted = box.chunks is not None and box.chunks.wanted(call)
    if format is RowFormat.JSON and not given:
        least = 0 if wanted else box.settings.chunk_bytes
        return format if await asyncio.to_thread(holds_array, uri, box, at_least=least) else None
    return format if given or wanted or format is RowFormat.PARQUET else None


def _choice(call: ToolCall, field: str, given: Any, known: type[Choice]) -> Choice:
    try:
        return known(str(given).lower())
    except ValueError:
        raise ToolError(
            f"artifact in step {call.step}: {field} {given!r} is unknown; known: {', '.join(known)}",
            kind="schema",
        ) from None


async def _put(call: ToolCall, box: Toolbox) -> ResultRef:
    config, store = call.config, call.config.get("store")
    if "value" not in config:
        raise ToolError(f"artifact put in step {call.step} has no 'value'", kind="schema")
    changes = {name: config[name] for name in ("ttl", "content_type", "scope") if config.get(name)}
    if config.get("compress"):
        changes["compression"] = "gzip" if config["compress"] is True else str(config["compress"])
    spec = call.task.spec.result.model_copy(update=changes)
    return await box.results.put(
        config["value"],
        execution_id=call.execution_id,
        step=call.step,
        name=str(config.get("name") or call.task.name),
        spec=ResultSpec.model_validate(spec.model_dump()),
        tier=None if store is None else _choice(call, "store", store, StoreTier),
        select=call.task.spec.result.select,
    )


async def _get(call: ToolCall, box: Toolbox) -> Any:
    """The reference of what is asked for, or its value where that was small enough to be stored nowhere."""
    asked = {**call.input, **call.config}
    given = next((asked[key] for key in ("ref", "result_ref", "uri") if asked.get(key) is not None), None)
    if given is not None:
        reference = as_result_ref(given)
        if reference is not None:
            return await box.results.find(reference if isinstance(reference, str) else reference.ref)
        return given if not isinstance(given, str) else await _of_step(call, box, given)
    step, name = asked.get("step"), asked.get("name")
    try:
        if name:
            return await box.results.find((call.execution_id, str(step or call.step), str(name)))
    except ReferenceNotAvailableError:
        if step is None:  # else the name may be the task's own
            raise
    if step is None:
        raise ToolError(
            f"artifact get in step {call.step} needs 'ref', 'step', or 'name' and 'step'", kind="schema"
        )
    return await _of_step(call, box, str(step))


async def _of_step(call: ToolCall, box: Toolbox, step: str) -> Any:
    result = call.scope.get(step)
    if not isinstance(result, ResultView):
        raise ToolError(
            f"artifact get in step {call.step}: {step!r:.80} is neither a reference nor a step that has run; write "
            'ref: "{{ <step>._ref }}", a name noetl://execution/..., or step: <step>',
            kind="not_found",
        )
    return result.stored or await with_references(result.plain, box.results.get)


def _read(box: Toolbox, uri: str) -> Any:
    """The value at a physical address, by the ending of its name."""
    content = locations.read_bytes(box.settings, uri)
    content_type = _CONTENT_TYPES.get(PurePosixPath(uri).suffix.lower())
    if content_type is not None:
        return codec.decode(content, content_type)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


CHUNKED_FORMATS = CUT_FORMATS | {RowFormat.PARQUET}
_READ_BYTES = 1 << 20
_LOOK = 1024  # bytes that show what a file is
_BATCH_ROWS = 1024


async def file_rows(uri: str, format: RowFormat, call: ToolCall, box: Toolbox) -> ToolResult:
    """The rows of a file: a list, of Parquet a table; by reference where they are more than a chunk.

    After a restart it is read from where the stored chunks end, unless it has changed; then they are compared.

    Args:
        format: one of ``CHUNKED_FORMATS``.

    Raises:
        StorageError: it is not there, or cannot be read.
        ToolError: it is not of the format, or has changed.
    """
    chunks = ChunkedResult(call, box)
    if not await chunks.seek():
        return await chunks.result()
    file = await asyncio.to_thread(_opened, uri, box)
    try:
        if chunks.position is not None and chunks.position["version"] != file.version:
            await chunks.begin_again()
        # of a file that nobody has asked to take apart a value may be all there is
        longest = RECORD_BYTES if call.config.get("format") or chunks.wanted else file.size
        at = chunks.position or {}
        found = file.tables(at) if format is RowFormat.PARQUET else file.pieces(format, at, longest)
        while True:
            with reading(uri):
                chunk = await asyncio.to_thread(next, found, None)
            if chunk is None:
                break
            await chunks.put(chunk)
        return await chunks.result()
    finally:
        await asyncio.to_thread(file.close)


def holds_array(uri: str, box: Toolbox, *, at_least: int) -> bool:
    """Whether a file begins as a JSON array does, and has so many bytes."""
    file = _opened(uri, box)
    try:
        return file.size >= at_least and begins_array(file.beginning(_LOOK))
    finally:
        file.close()


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Lets a block read a file whose content is the playbook's business.

    Raises:
        StorageError: it cannot be read.
        ToolError: it is not what its name says, or is damaged.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{uri} cannot be read: {error}") from error
    except ValueError as error:  # of Arrow and of JSON
        raise ToolError(
            f"{uri} is not what its name or 'format' says, or is damaged: {error}", kind="parse"
        ) from error


def _opened(uri: str, box: Toolbox) -> _File:
    with reading(uri):
        return _File(uri, box)


class _File:
    """An open file.

    Attributes:
        size: in bytes.
        version: another one when its bytes have changed: its size and when it was written.
    """

    def __init__(self, uri: str, box: Toolbox) -> None:
        self._uri = uri
        self._chunk_bytes = box.settings.chunk_bytes
        self._filesystem, path = locations.arrow_filesystem(box.settings, uri)
        info = self._filesystem.get_file_info(path)
        if not info.is_file:
            raise ReferenceNotAvailableError(f"no file is at {uri}")
        self.size: int = info.size
        self.version = f"{info.size}-{info.mtime_ns}"
        self._file = self._filesystem.open_input_file(path)

    def close(self) -> None:
        self._file.close()

    def beginning(self, size: int) -> bytes:
        return bytes(self._file.read(size))

    def pieces(self, format: RowFormat, position: dict[str, Any], longest: int) -> Iterator[Gathered]:
        """The chunks of a file of text, from the bytes that a position names."""
        cutter = cutter_for(format, self._chunk_bytes, position, self._uri, longest=longest)
        self._file.seek(position.get("offset", 0))
        while data := self._file.read(_READ_BYTES):
            for piece in cutter.feed(data):
                at = {"version": self.version, "offset": piece.offset, "columns": cutter.columns}
                yield Gathered(piece.rows, at)
        if (rest := cutter.end()) is not None:
            yield Gathered(rest.rows, full=False)

    def tables(self, position: dict[str, Any]) -> Iterator[Gathered]:
        """The chunks of a Parquet file, from the row that a position names."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        gathering = Gathering(self._chunk_bytes)
        row = position.get("row", 0)
        file = pq.ParquetFile(self._file, pre_buffer=False)
        if file.metadata.num_rows == 0:
            yield Gathered(file.schema_arrow.empty_table(), full=False)
        for batch in self._batches(file, row):
            row += batch.num_rows
            table = pa.Table.from_batches([batch])
            yield from gathering.add(table, {"version": self.version, "row": row})
        if (rest := gathering.rest()) is not None:
            yield rest

    def _batches(self, file: pq.ParquetFile, start: int) -> Iterator[pa.RecordBatch]:
        """The batches from a row on; groups of rows before it are not read."""
        metadata, group = file.metadata, 0
        while group < metadata.num_row_groups and metadata.row_group(group).num_rows <= start:
            start -= metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, metadata.num_row_groups))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups):
            skipped = min(start, batch.num_rows)
            start -= skipped
            if skipped < batch.num_rows:
                yield batch.slice(skipped)


async def tell_stored(ref: ResultRef, call: ToolCall, box: Toolbox) -> None:
    """Tells of the parts of a list of rows, of any other result as one chunk, where a step takes them."""
    chunks = box.chunks
    if chunks is None or not chunks.wanted(call):
        return
    if ref.kind is not RefKind.MANIFEST or strategy_of(ref) is not Strategy.CONCAT:
        if not await chunks.told(call):
            await chunks.tell(call, Chunk(0, ref, more=False))
        return
    place = len(await chunks.told(call))
    last = int(ref.extra["parts"]) - 1
    async for part in box.results.parts(ref, place):
        await chunks.tell(call, Chunk(place, part, more=place < last))
        place += 1
