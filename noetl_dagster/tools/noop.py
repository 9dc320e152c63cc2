"""``kind: noop``: does nothing, so that policies, ``set`` and arcs can stand alone."""

from __future__ import annotations

from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult


class NoopTool(Tool):
    """Input: anything. Output: the field ``result`` as it is, or an empty mapping."""

    kind = "noop"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        return ToolResult(data=call.config.get("result", {}))
