"""A stored result as chunks: the parts that it is made of, by reference."""

from __future__ import annotations

from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage.manifests import Strategy, strategy_of
from noetl_dagster.tools.base import Chunk, Toolbox, ToolCall


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
