"""``kind: python``: its fields; code in threads and in processes of its own."""

from __future__ import annotations

from noetl_dagster.playbook.tool_kinds import SCRIPT, TIMEOUT, ToolKind

KINDS = (
    ToolKind(
        "python",
        "noetl_dagster.tools.python.tool:PythonTool",
        {
            "code": "Python code; the keys of input are its variables",
            "script": SCRIPT,
            "libs": "Modules to import: a list, or a mapping of aliases",
            "isolation": "thread, or subprocess for a process of its own; default: NOETL_PYTHON_ISOLATION",
            "memory": "Limit of the address space of a subprocess: bytes, or text such as 512m",
            TIMEOUT: "Seconds after which the call fails, with error kind timeout; a subprocess is killed",
        },
        needs=("code", "script"),
        without_effect=("env", "iterator"),
    ),
)
