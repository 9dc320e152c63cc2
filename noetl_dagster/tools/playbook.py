"""``kind: playbook``: hands the call to the engine's hook, which runs a child execution."""

from __future__ import annotations

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult


class PlaybookTool(Tool):
    """Input: ``path``, ``input`` (the child's workload), ``return_step``, ``timeout``. Output: its result."""

    kind = "playbook"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        if box.run_playbook is None:
            raise ToolError(
                f"step {call.step}: this process cannot run child playbooks; run the step under the engine",
                kind="unknown",
            )
        return await box.run_playbook(call)
