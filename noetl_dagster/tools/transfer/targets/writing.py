"""Where a transfer writes: finds who writes to each kind of place; http."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.http import HttpTool
from noetl_dagster.tools.rows.files import json_row
from noetl_dagster.tools.transfer.chunks import Chunk, Source
from noetl_dagster.tools.transfer.options import Options
from noetl_dagster.tools.transfer.places import Place, PlaceKind
from noetl_dagster.tools.transfer.postgres import Outcome, write_postgres
from noetl_dagster.tools.transfer.targets.duckdb import write_duckdb
from noetl_dagster.tools.transfer.targets.files import write_file
from noetl_dagster.tools.transfer.targets.parts import write_parts

Watch = Callable[[AsyncIterator[Chunk]], AsyncIterator[Chunk]]


async def write_to(
    place: Place, source: Source, options: Options, call: ToolCall, box: Toolbox, watch: Watch
) -> Outcome:
    """Writes all rows to a place. Tables change all at once or not at all.

    Args:
        watch: is given the chunks on their way.
    """
    match place.kind:
        case PlaceKind.POSTGRES:
            return await write_postgres(place, source, options, call, box, watch)
        case PlaceKind.DUCKDB:
            return await write_duckdb(place, watch(source.chunks()), options, call)
        case PlaceKind.OBJECT if place.is_folder:
            return await write_parts(place, source, options, call, box, watch)
        case PlaceKind.OBJECT:
            return await write_file(place, watch(source.chunks()), options, call, box)
        case PlaceKind.HTTP:
            return await _http(place, watch(source.chunks()), call, box)
        case PlaceKind.RESULT:
            raise ToolError("transfer: a result is no target; use the artifact tool", kind="schema")


async def _http(place: Place, chunks: AsyncIterator[Chunk], call: ToolCall, box: Toolbox) -> Outcome:
    """Sends each chunk as a JSON list."""
    tool, count = HttpTool(), 0
    async for chunk in chunks:
        rows = [json_row(row) for row in chunk.as_rows()]
        config: dict[str, Any] = {"method": "POST", **place.request, "json": rows}
        await tool.run(replace(call, config=config, auth=place.auth), box)
        count += len(rows)
    return Outcome(count, count)
