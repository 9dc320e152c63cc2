"""``kind: transfer``: rows from one place to another, chunk by chunk."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, cast

import duckdb
import obstore

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.rows.files import Row
from noetl_dagster.tools.sql.duckdb import kind_of_duckdb
from noetl_dagster.tools.sql.tables import WriteMode, write_mode
from noetl_dagster.tools.transfer.places import Place, PlaceKind, read_place
from noetl_dagster.tools.transfer.sources import Chunks, read_chunks
from noetl_dagster.tools.transfer.targets import write_chunks

DEFAULT_CHUNK = 10_000


class TransferTool(Tool):
    """Copies rows.

    Input: ``source`` and ``target``, each ``{kind, auth, ...}`` with kind postgres, duckdb, object (s3, gcs
    or a file), http; a source may also be a result (``ref``); fields as in
    :class:`~noetl_dagster.tools.transfer.places.Place`. ``mode``: append (the default for tables), replace
    (for objects) or upsert by ``key``. ``chunk_size`` rows (10,000) are in memory at a time; only the body of
    an http source is held as a whole.

    Output: ``{rows, chunks, mode, source, target}``, the last two being the kinds.

    Raises ``ToolError``; a table is then as it was before.
    """

    kind = "transfer"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        source = read_place(call.config.get("source"), "source", call)
        target = read_place(call.config.get("target"), "target", call)
        if "key" in call.config and not target.key:
            key = call.config["key"]
            target = target.model_copy(update={"key": (key,) if isinstance(key, str) else tuple(key)})
        mode = _mode(call.config.get("mode") or target.mode, target)
        size = max(1, int(call.config.get("chunk_size") or DEFAULT_CHUNK))
        progress = _Progress(call, box)
        try:
            async with aclosing(cast(Any, read_chunks(source, call, box, size))) as chunks:
                counted = progress.over(chunks)
                rows = await write_chunks(target, counted, mode, call, box)
        except (duckdb.Error, obstore.exceptions.BaseError, StorageError, OSError, ValueError) as error:
            text = f"transfer in step {call.step}: {type(error).__name__}: {error}"
            kind = "parse" if isinstance(error, ValueError) else kind_of_duckdb(error)
            raise ToolError(box.credentials.redact(text), kind=kind) from None
        data = {
            "rows": rows,
            "chunks": progress.chunks,
            "mode": mode.value,
            "source": source.kind.value,
            "target": target.kind.value,
        }
        return ToolResult(data=data)


class _Progress:
    """Counts chunks on their way and tells the worker, so that a long transfer keeps its claim."""

    def __init__(self, call: ToolCall, box: Toolbox) -> None:
        self._call = call
        self._box = box
        self.chunks = 0
        self.rows = 0

    async def over(self, chunks: Chunks) -> Chunks:
        chunk: list[Row]
        async for chunk in chunks:
            self.chunks += 1
            self.rows += len(chunk)
            yield chunk
            self._box.progress(self._call, f"{self.rows} rows transferred")


def _mode(given: Any, target: Place) -> WriteMode:
    if given is None:
        return WriteMode.REPLACE if target.kind is PlaceKind.OBJECT else WriteMode.APPEND
    return write_mode(str(given))
