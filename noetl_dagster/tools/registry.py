"""Loads the tool of a kind on first use; the kinds that run nothing themselves: ``noop``, ``playbook`` and so on."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from noetl_dagster.errors import NoetlError, ToolError
from noetl_dagster.extras import has_extra, needs_extra
from noetl_dagster.playbook.tool_kinds import TIMEOUT, TOOL_KINDS, ToolKind, unsupported_kind
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult

WORKBOOK = "workbook"
"""No tool of its own: the pipeline runs the named task of the playbook's ``workbook``."""

KINDS = (
    ToolKind(
        "noop", "noetl_dagster.tools.registry:NoopTool", {"result": "The result of the task"}, takes_anything=True
    ),
    ToolKind(
        "playbook",
        "noetl_dagster.tools.registry:PlaybookTool",
        {
            ("path", "playbook", "playbook_path", "task"): (
                "File, catalog path, or registered playbook (path@2, path@latest)"
            ),
            "version": "Registered version of the playbook",
            "return_step": "Step of the child whose result is returned; default: its last result",
            TIMEOUT: "Seconds after which the child is cancelled and the task fails",
        },
        needs=("path",),
        name_fills="path",
        without_effect=("wait",),
        keeps_to_driver=True,
    ),
    ToolKind(WORKBOOK, "", {"task": "Name of the task in the playbook's workbook"}, needs=("task",), name_fills="task"),
)


@cache
def tool_for(kind: str) -> Tool:
    """Returns the tool of a kind; one object per process.

    Raises:
        ToolError: of kind ``schema``, the kind is not supported: the playbook was loaded leniently; of kind
            ``policy``, the extra that it needs is not installed, or Spark is not.
        NoetlError: for ``workbook``, which the pipeline resolves to another task.
    """
    if kind == WORKBOOK:
        raise NoetlError("tool kind 'workbook' stands for a task of the playbook's workbook; run that task")
    description = TOOL_KINDS.get(kind)
    if description is None:
        raise ToolError(unsupported_kind(kind), kind="schema")
    extra = description.extra
    if extra and not has_extra(extra):
        raise ToolError(needs_extra(f"kind {kind}", extra), kind="policy")
    module_name, _, class_name = description.tool.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != "pyspark":
            raise
        raise ToolError(
            f"kind {kind} needs pyspark, which the image noetl-dagster-worker does not have; run the step in a pool "
            "whose workers have the image noetl-dagster",
            kind="policy",
        ) from None
    tool: Tool = getattr(module, class_name)()
    return tool


class NoopTool(Tool):
    """Does nothing, so that policies, ``set`` and arcs need no tool.

    Output: the field ``result``, or an empty mapping.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Returns the field ``result``."""
        return ToolResult(data=call.config.get("result", {}))


class PlaybookTool(Tool):
    """Runs a child execution.

    Input: ``path``, ``input`` (the child's workload), ``return_step``, ``timeout``. Output: its result.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Passes the call to the engine, which runs the child execution."""
        if context.run_playbook is None:
            raise ToolError(
                f"step {call.step}: this process cannot run child playbooks; run the step under the engine",
                kind="unknown",
            )
        return await context.run_playbook(call)
