"""``kind: artifact`` (also ``result`` and ``resolve``): values by reference."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.playbook.models import ResultSpec
from noetl_dagster.playbook.templates.rendering import with_references
from noetl_dagster.playbook.templates.views import ResultView
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import locations
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.tools.base import Chunk, Tool, ToolCall, ToolContext, ToolResult, as_result_ref
from noetl_dagster.tools.chunks.files import file_rows, reading, value_of
from noetl_dagster.tools.rows.formats import FORMAT_BY_ENDING, RowFormat
from noetl_dagster.tools.rows.reader import RowFile


class ArtifactAction(StrEnum):
    """The actions of the artifact tool."""

    GET = "get"
    PUT = "put"


class ArtifactTool(Tool):
    """Stores a value, or finds one that is stored.

    Input: ``action`` (``get`` or ``put``; default ``put`` if there is a ``value``, else ``get``).
    ``put``: ``value``, ``name`` (default: the task's), ``store`` (a tier), ``ttl`` seconds, ``compress``
    (none, gzip, lz4), ``content_type``. ``get``: ``ref`` (a reference, its logical name, or the name of a step),
    ``step`` of this execution, with ``name`` if it stored several, or ``uri``, the physical address of an object
    in a mount or in the minio tier.

    Output: the value by reference: ``output.ref`` is the reference, and the first use of the result fetches it. With
    ``uri``, and for a step whose result was not stored, the value itself: parsed JSON, a Parquet table, text, or
    bytes. With ``format`` (jsonl, csv, json) it is the list of the rows at ``uri``; so it is for files that end in
    .jsonl and .csv if a step takes the chunks. Rows, JSON arrays and Parquet tables are read chunk by chunk, and
    returned by reference if they are more than one chunk.

    Raises ``ToolError``, with code ``REFERENCE_NOT_AVAILABLE`` when there is no such value.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Stores or finds the value."""
        default = ArtifactAction.PUT if "value" in call.config else ArtifactAction.GET
        action = call.word("action", ArtifactAction, default)
        uri = call.config.get("uri")
        try:
            if uri and action is ArtifactAction.GET and as_result_ref(uri) is None:
                return await _read(str(uri), call, context)
            result = await (_put(call, context) if action is ArtifactAction.PUT else _get(call, context))
        except StorageError as error:
            raise call.error(f"{action}: {error}", error.kind, code=getattr(error, "code", None)) from None
        if not isinstance(result, ResultRef):
            return ToolResult(data=result)
        if action is ArtifactAction.GET:
            await _record_parts(result, call, context)
        return ToolResult(ref=result)


async def _read(uri: str, call: ToolCall, context: ToolContext) -> ToolResult:
    """Reads a physical address: chunk by chunk if its format allows that, else the value as a whole."""
    format = _row_format(uri, call, context)
    if format is RowFormat.JSON and not call.config.get("format"):
        least = 0 if context.chunks.wanted(call) else context.settings.chunk_bytes
        file = await _open(uri, context)
        with reading(uri):
            if file.size < least or not await file.is_array():
                format = None
    if format is not None:
        return await file_rows(partial(_open, uri, context), uri, format, call, context)
    with reading(uri):
        content = await asyncio.to_thread(locations.read_bytes, context.settings, uri)
        return ToolResult(data=await asyncio.to_thread(value_of, content, uri, call))


async def _open(uri: str, context: ToolContext) -> RowFile:
    with reading(uri):
        return await asyncio.to_thread(RowFile.at, uri, context.settings)


def _row_format(uri: str, call: ToolCall, context: ToolContext) -> RowFormat | None:
    """Returns the format of a file that may be read chunk by chunk."""
    if not uri.startswith(("s3://", "gs://")) and locations.local_path(context.settings, uri) is None:
        return None
    word = str(call.config.get("format") or "").lower()
    format = FORMAT_BY_ENDING.get(f".{word}" if word else PurePosixPath(uri).suffix.lower())
    return format if word or context.chunks.wanted(call) or format in (RowFormat.JSON, RowFormat.PARQUET) else None


async def _put(call: ToolCall, context: ToolContext) -> ResultRef:
    config = call.config
    if "value" not in config:
        raise call.error("put has no 'value'")
    changes = {name: config[name] for name in ("ttl", "content_type", "scope") if config.get(name)}
    if config.get("compress"):
        changes["compression"] = "gzip" if config["compress"] is True else str(config["compress"])
    spec = call.task.spec.result.model_copy(update=changes)
    return await context.results.put(
        config["value"],
        execution_id=call.execution_id,
        step=call.step,
        name=str(config.get("name") or call.task.name),
        spec=ResultSpec.model_validate(spec.model_dump()),
        tier=None if config.get("store") is None else call.word("store", StoreTier),
        select=call.task.spec.result.select,
    )


async def _get(call: ToolCall, context: ToolContext) -> Any:
    """Returns the requested reference, or the value of a step that was small enough not to be stored."""
    asked = {**call.input, **call.config}
    address = next((asked[key] for key in ("ref", "result_ref", "uri") if asked.get(key) is not None), None)
    if address is not None:
        reference = as_result_ref(address)
        if reference is not None:
            return await context.results.find(reference if isinstance(reference, str) else reference.ref)
        return address if not isinstance(address, str) else await _of_step(call, context, address)
    step, name = asked.get("step"), asked.get("name")
    try:
        if name:
            return await context.results.find((call.execution_id, str(step or call.step), str(name)))
    except ReferenceNotAvailableError:
        if step is None:  # else the name may be the task's own
            raise
    if step is None:
        raise call.error("get needs 'ref', 'step', or 'name' and 'step'")
    return await _of_step(call, context, str(step))


async def _of_step(call: ToolCall, context: ToolContext, step: str) -> Any:
    result = call.scope.get(step)
    if not isinstance(result, ResultView):
        raise call.error(
            f"get: {step!r:.80} is neither a reference nor a step that has run; write "
            'ref: "{{ <step>._ref }}", a name noetl://execution/..., or step: <step>',
            "not_found",
        )
    return result.stored or await with_references(context.results.get, result.plain)


async def _record_parts(ref: ResultRef, call: ToolCall, context: ToolContext) -> None:
    """Records a stored result as chunks if a step takes them: the parts of a list of rows, any other as one chunk."""
    chunks = context.chunks
    if not chunks.wanted(call):
        return
    index = len(await chunks.recorded(call))
    if ref.kind is RefKind.MANIFEST and strategy_of(ref) is Strategy.CONCAT:
        last = int(ref.extra["parts"]) - 1
        async for part in context.results.parts(ref, index):
            await chunks.record(call, Chunk(index, part, more=index < last))
            index += 1
    elif not index:
        await chunks.record(call, Chunk(0, ref, more=False))
