"""``kind: shell`` and ``kind: script``: commands in processes that end with the call."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.errors import ToolError, kind_of
from noetl_dagster.playbook.templates.environment import text_of
from noetl_dagster.process.environment import playbook_environment
from noetl_dagster.tools.base import (
    JobMessages,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    pipes_variables,
    time_limit,
)
from noetl_dagster.tools.commands.processes import ProcessRun, confinement, run_process
from noetl_dagster.tools.files import load_script, own_folders
from noetl_dagster.values import RefusedValueError, admit

SHELL = "/bin/sh"
EXCERPT = 500
_INTERPRETERS = {".py": (sys.executable,), ".sh": (SHELL,), ".bash": ("bash",)}


class ShellTool(Tool):
    """Runs shell commands, or a script file.

    Input: ``cmds`` (text or a list; one shell, ``shell``, runs them in order and stops at the first that
    fails), ``code`` (the text of a script) or ``script`` (a file); scripts take ``args`` and ``interpreter``
    (default: the first line ``#!``, the file's ending, the shell); ``env`` (further variables), ``cwd``
    (default: the playbook's folder, or that of playbooks if it does not exist here), ``timeout`` seconds.
    ``NOETL_INPUT`` contains the task's input as JSON. Of this process's variables, commands see basic ones and those of
    ``NOETL_PLAYBOOK_ENV``. With ``pipes: true``, the commands' processes may call ``open_dagster_pipes``, and the
    Dagster run gets their logs and metadata; use ``pipes: objects`` for jobs on other
    machines.

    Output: ``{exit_code, stdout, stderr, truncated}``; of long output the last mebibyte, after a line that says so.

    Raises ``ToolError`` for an exit code other than 0 (``error.code``), of kind ``timeout`` after the time limit, and
    ``RefusedValueError`` if stdout is no text. All processes that the commands started end with the call.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the commands and returns their outcome."""
        try:
            most = context.settings.playbook_seconds
            async with time_limit(call, most), pipes_variables(call, context, JobMessages.FILE) as variables:
                finished = await self._run(call, context, variables)
        except OSError as error:
            raise ToolError(f"{call.task.kind} in step {call.step}: {error}", kind=kind_of(error)) from None
        code, stdout, stderr = finished.exit_code, str(finished.stdout), str(finished.stderr)
        if code != 0:
            outcome = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            output = (stderr.strip() or stdout.strip())[-EXCERPT:]
            text = f"shell in step {call.step} {outcome}{': ' if output else ''}{output}"
            raise ToolError(text, kind="unknown", code=code)
        if (fault := finished.stdout.fault) is not None:
            raise RefusedValueError(
                f"{call.task.kind} in step {call.step}: stdout",
                f"is no UTF-8 text, since {fault}; convert it in the command, with iconv or base64, or write a file",
            )
        truncated = finished.stdout.is_cut or finished.stderr.is_cut
        return ToolResult(data={"exit_code": code, "stdout": stdout, "stderr": stderr, "truncated": truncated})

    async def _run(self, call: ToolCall, context: ToolContext, variables: Mapping[str, str]) -> ProcessRun:
        config = call.config
        confined = confinement(context.settings)
        if variables and confined.has_own_user and config["pipes"] in (True, JobMessages.FILE):
            raise call.error("pipes: true uses a file that NOETL_PLAYBOOK_USER cannot write; write pipes: objects")
        env = playbook_environment(context.settings)
        named = (config.get("env") or {}).items()
        own = {str(name): text_of(value) for name, value in named if value is not None} | dict(variables)
        own["NOETL_INPUT"] = orjson.dumps(admit(call.input, "input")).decode()
        existing = next(filter(Path.is_dir, own_folders(call.folder, context.settings)))
        folder = existing / str(config.get("cwd") or ".")
        script = await load_script(call, context) if "script" in config else config.get("code")
        with ExitStack() as stack:
            private = None
            if script or confined.has_own_user:
                private = stack.enter_context(confined.private_folder("noetl-script-"))
            env |= confined.variables(private) | own
            return await run_process(_command(call, script, private), folder=folder, env=env, confined=confined)


def _command(call: ToolCall, script: str | None, private: Path | None) -> list[str]:
    """Returns the command of a call; a script becomes a file of the private folder."""
    config = call.config
    if not script or private is None:
        commands = config.get("cmds")
        if not commands:
            raise ToolError(f"{call.task.kind} in step {call.step} has no 'cmds'", kind="schema")
        text = "\n".join(map(str, commands)) if isinstance(commands, list | tuple) else str(commands)
        shell = str(config.get("shell") or SHELL)
        return [shell, "-c", f"set -e\n{text}"]
    file = private / "script"
    file.write_text(script)
    arguments = (text_of(part) for part in config.get("args") or () if part is not None)
    return [*_interpreter(script, config), str(file), *arguments]


def _interpreter(script: str, config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the task's interpreter, else that of the script's first line, of its suffix, or the shell."""
    named = config.get("interpreter")
    if named:
        return (str(named),) if isinstance(named, str) else tuple(map(str, named))
    if script.startswith("#!"):
        return tuple(script.partition("\n")[0].removeprefix("#!").split())
    source = config.get("script", "")
    uri = source if isinstance(source, str) else source["uri"]
    return _INTERPRETERS.get(Path(uri).suffix, (SHELL,))
