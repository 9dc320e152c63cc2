"""``kind: transfer``: rows from one place to another, chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import duckdb
import obstore

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.sql.duckdb import kind_of_duckdb
from noetl_dagster.tools.transfer.chunks import Chunk
from noetl_dagster.tools.transfer.options import Options, Verify, read_options
from noetl_dagster.tools.transfer.places import Place, PlaceKind, place_format, read_place
from noetl_dagster.tools.transfer.postgres import Outcome
from noetl_dagster.tools.transfer.sources.opening import open_source
from noetl_dagster.tools.transfer.sources.postgres import PostgresSource
from noetl_dagster.tools.transfer.targets.writing import write_to


class TransferTool(Tool):
    """Copies rows.

    Input: ``source`` and ``target``, each ``{kind, auth, ...}`` with kind postgres, duckdb, object (s3, gcs
    or a file), http; a source may also be a result (``ref``); fields as in
    :class:`~noetl_dagster.tools.transfer.places.Place`. ``mode``: append (the default for tables), replace
    (for objects) or upsert by ``key``. ``chunk_size`` rows (10,000) are in memory at a time; only a response of
    http and a JSON file are held as a whole. ``verify``: rows (the default), checksum or none; ``on_drift``: error (the
    default), ignore or add; ``resumable``: true, false or auto (the default).

    Output: ``{rows, chunks, mode, source, target, checksum, verified}``: ``source`` and ``target`` are the kinds,
    ``verified`` is ``{by, read, written}``; where they are, ``added`` and ``ignored`` columns, and the rows that an
    earlier process had ``resumed`` from.

    Raises ``ToolError``; a table is then as it was before.
    """

    kind = "transfer"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        source = read_place(call.config.get("source"), "source", call)
        target = read_place(call.config.get("target"), "target", call)
        if "key" in call.config and not target.key:
            key = call.config["key"]
            target = target.model_copy(update={"key": (key,) if isinstance(key, str) else tuple(key)})
        options = read_options(call, target)
        progress = _Progress(call, box)
        try:
            async with open_source(
                source,
                call,
                box,
                options.size,
                tables=_takes_tables(target),
                snapshot=options.verify is Verify.CHECKSUM,
            ) as opened:
                if options.verify is Verify.CHECKSUM and isinstance(opened, PostgresSource):
                    await _refuse_inexact(opened, target, call)
                outcome = await write_to(target, opened, options, call, box, progress.over)
        except (duckdb.Error, obstore.exceptions.BaseError, StorageError, OSError, ValueError) as error:
            text = f"transfer in step {call.step}: {type(error).__name__}: {error}"
            kind = "parse" if isinstance(error, ValueError) else kind_of_duckdb(error)
            raise ToolError(box.credentials.redact(text), kind=kind) from None
        return ToolResult(data=_data(outcome, progress.chunks, options, source, target))


async def _refuse_inexact(source: PostgresSource, target: Place, call: ToolCall) -> None:
    if _takes_tables(target) and (columns := await source.inexact()):
        raise ToolError(
            f"transfer in step {call.step}: numbers of column {', '.join(columns)} have more digits than a double, as "
            "which the target would have them. Read them as text or double precision with source.query, or write "
            "verify: rows",
            kind="schema",
        )


def _takes_tables(target: Place) -> bool:
    if target.kind is PlaceKind.OBJECT:
        return place_format(target) is RowFormat.PARQUET
    return target.kind is PlaceKind.DUCKDB


def _data(outcome: Outcome, chunks: int, options: Options, source: Place, target: Place) -> dict[str, Any]:
    verified: dict[str, Any] = {"by": options.verify.value}
    if options.verify is not Verify.NONE:
        verified |= {"read": outcome.rows, "written": outcome.written, **outcome.verified}
    data = {
        "rows": outcome.rows,
        "chunks": chunks or -(-outcome.rows // options.size),
        "mode": options.mode.value,
        "source": source.kind.value,
        "target": target.kind.value,
        "checksum": outcome.checksum,
        "verified": verified,
        **outcome.drift,
    }
    return data if outcome.resumed is None else {**data, "resumed": outcome.resumed}


class _Progress:
    """Counts chunks on their way and tells the worker, so that a long transfer keeps its claim.

    Attributes:
        chunks: of rows; bytes of COPY have none.
    """

    def __init__(self, call: ToolCall, box: Toolbox) -> None:
        self._call = call
        self._box = box
        self._rows = self._bytes = self.chunks = 0

    async def over(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async with aclosing(cast(Any, chunks)) as stream:
            async for chunk in stream:
                yield chunk
                self._count(chunk)

    def _count(self, chunk: Chunk) -> None:
        if isinstance(chunk.data, bytes):
            self._bytes += len(chunk.data)
            self._box.progress(self._call, f"{self._bytes >> 20} MB transferred")
            return
        self.chunks += 1
        self._rows += chunk.rows
        self._box.progress(self._call, f"{self._rows} rows transferred")
