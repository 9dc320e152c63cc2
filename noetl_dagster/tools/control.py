"""Tools that run nothing themselves: ``noop``, and ``playbook``, which runs a child execution."""

from __future__ import annotations

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult


class NoopTool(Tool):
    """Does nothing, so that policies, ``set`` and arcs need no tool.

    Output: the field ``result``, or an empty mapping.
    """

    kind = "noop"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        """Returns the field ``result``."""
        return ToolResult(data=call.config.get("result", {}))


class PlaybookTool(Tool):
    """Runs a child execution.

    Input: ``path``, ``input`` (the child's workload), ``return_step``, ``timeout``. Output: its result.
    """

    kind = "playbook"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        """Passes the call to the engine, which runs the child execution."""
        if box.run_playbook is None:
            raise ToolError(
                f"step {call.step}: this process cannot run child playbooks; run the step under the engine",
                kind="unknown",
            )
        return await box.run_playbook(call)
