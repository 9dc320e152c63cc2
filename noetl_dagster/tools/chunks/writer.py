"""Stores the rows of a call chunk by chunk, and goes on where an earlier run of the call stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from noetl_dagster.errors import ToolError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.tools.base import Chunk, Toolbox, ToolCall


@dataclass(slots=True)
class _Held:
    """A stored chunk that waits for what comes after it, which it says."""

    ref: ResultRef
    position: Any


class ChunkWriter:
    """The chunks of one call's result.

    A chunk says whether another one follows, so the latest is held back until then: its reference, not its rows.

    Attributes:
        stored: chunks that an earlier run of the call has stored.
        position: where a producer that can seek goes on: what came with the last stored chunk; None at the beginning.
        rows: of all chunks so far, stored ones included.
    """

    def __init__(self, call: ToolCall, box: Toolbox, stored: Sequence[Chunk], *, seeks: bool) -> None:
        self._call = call
        self._box = box
        self._seeks = seeks
        self._parts = [chunk.ref for chunk in stored]
        self._place = len(stored) if seeks else 0
        self._held: _Held | None = None
        self.stored = len(stored)
        self.is_whole = bool(stored) and not stored[-1].more
        self.position = stored[-1].position if stored else None
        self.rows = sum(ref.rows or 0 for ref in self._parts)

    @classmethod
    async def open(cls, call: ToolCall, box: Toolbox, *, seeks: bool = False) -> Self:
        """A writer that goes on after what is stored.

        Args:
            seeks: the producer begins at ``position``; else it begins anew, and what is stored is only compared.
        """
        stored = [] if box.chunks is None else await box.chunks.told(call)
        return cls(call, box, stored, seeks=seeks)

    async def put(self, rows: Any, position: Any = None) -> None:
        """Stores the next chunk, a list or an Arrow table, and tells of the one before.

        Raises:
            ToolError: a chunk that is stored already was another one: the source has changed meanwhile.
            StorageError: no tier took it.
        """
        place, self._place = self._place, self._place + 1
        ref = await self._box.results.put(
            rows,
            execution_id=self._call.execution_id,
            step=self._call.step,
            name=f"{self._call.task.name}-chunk-{place}",
            spec=self._call.task.spec.result,
        )
        if place < self.stored:
            await self._compare(place, ref)
            return
        await self._tell(more=True)
        self._held = _Held(ref, position)
        self._parts.append(ref)
        self.rows += ref.rows or 0

    async def finish(self, fields: Mapping[str, Any] | None = None) -> ResultRef:
        """Tells of the last chunk and makes one result of all: a list of rows, or ``rows`` beside ``fields``."""
        await self._tell(more=False)
        call = self._call
        return await self._box.results.manifest(
            call.execution_id,
            call.step,
            call.task.name,
            self._parts,
            Strategy.CONCAT,
            spec=call.task.spec.result,
        )

    async def _tell(self, *, more: bool) -> None:
        held, self._held = self._held, None
        if held is None or self._box.chunks is None:
            return
        index = len(self._parts) - 1
        await self._box.chunks.tell(self._call, Chunk(index, held.ref, position=held.position, more=more))

    async def _compare(self, place: int, ref: ResultRef) -> None:
        before = self._parts[place]
        await self._box.results.delete(ref)
        if (before.sha256, before.rows) != (ref.sha256, ref.rows):
            raise ToolError(
                f"{self._call.task.kind} in step {self._call.step}: chunk {place} is not what it was when an earlier "
                "run stored it; the source has changed, or gives its rows in another order each time: order them, or "
                "start a new execution",
                kind="schema",
            )
