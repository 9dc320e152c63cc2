"""The tool classes by kind, and tools that run nothing themselves: ``noop`` and ``playbook``.

Modules load on first use, so a playbook loads only the tools that it names.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from noetl_dagster.errors import NoetlError, ToolError
from noetl_dagster.extras import has_extra, needs_extra
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS, unsupported_kind
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult

_TOOLS = {
    "bigquery": ("sql.databases.tool", "DatabaseTool"),
    "artifact": ("artifact", "ArtifactTool"),
    "container": ("commands.container", "ContainerTool"),
    "duckdb": ("sql.duckdb", "DuckdbTool"),
    "ducklake": ("sql.duckdb", "DuckdbTool"),
    "gcs": ("buckets.tool", "GcsTool"),
    "http": ("http.tool", "HttpTool"),
    "mysql": ("sql.databases.tool", "DatabaseTool"),
    "nats": ("nats", "NatsTool"),
    "noop": ("registry", "NoopTool"),
    "playbook": ("registry", "PlaybookTool"),
    "postgres": ("sql.postgres", "PostgresTool"),
    "python": ("python.tool", "PythonTool"),
    "resolve": ("artifact", "ArtifactTool"),
    "result": ("artifact", "ArtifactTool"),
    "s3": ("buckets.tool", "S3Tool"),
    "script": ("commands.shell", "ShellTool"),
    "secrets": ("secrets", "SecretsTool"),
    "shell": ("commands.shell", "ShellTool"),
    "snowflake": ("sql.databases.tool", "DatabaseTool"),
    "spark": ("spark.tool", "SparkTool"),
    "sqlite": ("sql.databases.tool", "DatabaseTool"),
    "transfer": ("transfer.tool", "TransferTool"),
}

WORKBOOK = "workbook"
"""No tool of its own: the pipeline runs the named task of the playbook's ``workbook``."""

KINDS = frozenset(_TOOLS) | {WORKBOOK}
"""Every kind that a playbook may name."""


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
    try:
        module_name, class_name = _TOOLS[kind]
    except KeyError:
        raise ToolError(unsupported_kind(kind), kind="schema") from None
    extra = TOOL_KINDS[kind].extra
    if extra and not has_extra(extra):
        raise ToolError(needs_extra(f"kind {kind}", extra), kind="policy")
    try:
        module = import_module(f"noetl_dagster.tools.{module_name}")
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
