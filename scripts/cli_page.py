"""The commands of ``noetl-dagster`` as a page of the documentation, from Typer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from page_text import cell, code, markdown, page, table

from noetl_dagster.cli.app import COMMANDS, GROUPS, LazyCommand

HEAD = """# Command line

All commands of `noetl-dagster`, with their arguments, options and defaults.

Commands read their [settings](settings.md) from the environment. Results go to standard output. Progress, warnings and
errors go to standard error. The exit code is 0 if the command succeeded, 1 if it failed, and 2 if an argument or a
setting is invalid. `noetl-dagster COMMAND --help` shows the same text, and `noetl-dagster --version` shows the version.
`noetl-dagster --install-completion` sets up
[completion](../how-to/local-development.md#complete-commands-with-tab) in your shell.
"""
_VALUES = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH"}


def cli_page() -> str:
    """``docs/reference/cli.md``."""
    return page(HEAD, *(lines for group, names in GROUPS.items() for lines in ([f"## {group}\n"], _commands(names))))


def _commands(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        target, help = COMMANDS[name]
        command = LazyCommand(name, target, help).load()
        yield from _entry(command, f"noetl-dagster {name}", "###")
        for below in getattr(command, "commands", {}).values():
            yield from _entry(below, f"noetl-dagster {name} {below.name}", "####")


def _entry(command: Any, path: str, level: str) -> Iterator[str]:
    yield f"{level} {path.removeprefix('noetl-dagster ')}\n"
    yield markdown(inspect.cleandoc(command.help or "")) + "\n"
    context = command.context_class(command, info_name=path)
    usage = _names(" ".join(command.collect_usage_pieces(context)))
    yield from ["```text", f"{path} {usage}".strip(), "```", ""]
    shown = [one for one in command.params if not one.hidden and one.name != "help"]
    shown.sort(key=lambda one: one.param_type_name != "argument")
    yield from table(("argument or option", "default", "meaning"), (_row(one, context) for one in shown))


def _row(parameter: Any, context: Any) -> tuple[str, str, str]:
    default, meaning = parameter.default, cell(parameter.help)
    if parameter.param_type_name == "argument":
        name = _names(*parameter.get_usage_pieces(context))
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.is_flag:
            default = None
        else:
            type_ = parameter.display_type(context).strip("<>").removesuffix(" range")
            name += f" {parameter.metavar or _VALUES.get(type_, type_)}"
    return code(name), code(getattr(default, "value", default)), meaning


def _names(usage: str) -> str:
    """Writes the names of arguments in capitals: Typer shows ``{playbook}`` and ``[execution_id]``."""
    return re.sub(r"\{(\w+)\}|(\[[a-z_]+\])", lambda found: (found[1] or found[2]).upper(), usage)
