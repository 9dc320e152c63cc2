"""A toolbox over no event log: commands end with their calls, and no step takes chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noetl_dagster.tools.base import Chunk, Removal, ToolCall, ToolContext


class NoLog:
    """Records nothing. ``removals`` are those of the calls so far."""

    def __init__(self) -> None:
        self.removals: list[Removal] = []

    def after(self, call: ToolCall, removal: Removal) -> None:
        self.removals.append(removal)

    async def over(self, call: ToolCall) -> bool:
        return False

    def wanted(self, call: ToolCall) -> bool:
        return False

    async def recorded(self, call: ToolCall) -> Sequence[Chunk]:
        return ()

    async def record(self, call: ToolCall, *chunks: Chunk) -> None:
        pass

    def toolbox(self, *parts: Any) -> ToolContext:
        return ToolContext(*parts, self.after, self.over, self)
