"""The commands of ``noetl-dagster``, loaded when they are called, and their error handling."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from noetl_dagster import __version__
from noetl_dagster.cli.console import fail, notes_become_records
from noetl_dagster.errors import NoetlError
from noetl_dagster.process import logs
from noetl_dagster.process.collector import importing
from noetl_dagster.process.environment import hide_from_children
from noetl_dagster.settings import LogFormat, Settings, get_settings

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run:run", "Run a playbook as its Dagster job; exit code 0 if it completes, else 1."),
    "resume": ("run:resume", "Resume an execution that failed or lost its process; finished work is not repeated."),
    "status": ("executions:status", "Show the state of an execution: its steps, loops and pool commands."),
    "events": ("executions:events", "Print every event of an execution, oldest first."),
    "cancel": (
        "executions:cancel",
        "Cancel an execution: it starts no new commands, and its running commands are notified.",
    ),
    "executions": ("executions:listing", "List the newest executions."),
    "state": ("state:app", "Show or set how far the steps of a playbook have loaded their sources."),
    "check": (
        "check:check",
        "Find mistakes in playbooks without running them; exit code 1 on errors, and for a folder without playbooks.",
    ),
    "register": ("authoring:register", "Register playbooks as versions, which then run without their files."),
    "schema": ("check:schema", "Print the JSON Schema of the playbook language, for editors."),
    "init": (
        "authoring:init",
        "Create a working project: a playbook, its Definitions and a test; or a copy of an example.",
    ),
    "new": ("authoring:new", "Write a commented playbook of two steps that can run at once."),
    "demo": ("demo:demo", "Run the patient flow on a simulated records API with faults."),
    "serve": ("serve:serve", "Serve the HTTP API, and move worker events from NATS into the event log."),
    "worker": ("processes:worker", "Run commands of steps with ``dispatch: workers`` until interrupted."),
    "ingest": ("processes:ingest", "Move worker events from NATS into the event log until interrupted."),
    "project": ("upkeep:project", "Apply the events to noetl.execution that it does not have yet."),
    "replay": ("upkeep:replay", "Rebuild noetl.execution from the event log alone."),
    "reap": (
        "upkeep:reap",
        "Requeue the commands of silent workers, and release the rows that dead cursor loops claimed.",
    ),
    "maintain": ("upkeep:maintain", "Create and drop partitions of the event log, and delete expired results."),
    "dead-letters": ("upkeep:letters_app", "List or reprocess messages of workers that could not be ingested."),
    "provision": (
        "provision:provision",
        "Create what a deployment needs: schema, streams, buckets, storage.",
    ),
    "verify": ("verify:verify", "Check events, the projection, results and stored objects of executions."),
    "settings": ("settings:settings", "Show the settings of this process; secrets are hidden."),
    "doctor": ("settings:doctor", "Try every address, credential, folder and program of the settings."),
    "services": ("services:app", "Manage the embedded PostgreSQL, NATS and object store."),
    "records-api": ("records:records_api", "Serve simulated clinical records until interrupted."),
}
"""Where each command is defined (in ``cli/commands`` unless the module has its full name), and its overview line."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Executions": ("run", "resume", "status", "events", "executions", "cancel", "state"),
    "Playbooks and projects": ("init", "new", "check", "register", "schema", "demo"),
    "Processes of a deployment": ("serve", "worker", "ingest"),
    "Upkeep": ("provision", "maintain", "verify", "dead-letters", "project", "replay", "reap"),
    "Environment": ("settings", "doctor", "services", "records-api"),
}
"""Headings of the overview and of the reference, with their commands."""

COLLECT_AFTER = 20_000
"""Objects until the collector looks for garbage: most that a command makes stay until it ends."""


class LazyCommand(TyperCommand):
    """Represents a command in the overview, and imports the real one when it is called."""

    def __init__(self, name: str, target: str, help: str, group: str | None = None) -> None:
        super().__init__(name, help=help, rich_help_panel=group)
        self._target = target

    def load(self) -> Any:
        """Imports the command itself, a ``TyperCommand`` or a ``TyperGroup``."""
        module, _, attribute = self._target.partition(":")
        if "." not in module:
            module = f"noetl_dagster.cli.commands.{module}"
        with importing():
            defined = getattr(import_module(module), attribute)
        if isinstance(defined, typer.Typer):
            group = get_command(defined)
            group.help = self.help
            return group
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(_run_to_end(defined) if iscoroutinefunction(defined) else defined)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Imports the command and parses its arguments."""
        return self.load().make_context(info_name, args, parent, **extra)


def _run_to_end(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    import asyncio  # which ``--help`` does not need

    @wraps(command)
    def run(**arguments: Any) -> None:
        asyncio.run(command(**arguments))

    return run


class Commands(TyperGroup):
    """The commands of ``noetl-dagster``."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for group, names in GROUPS.items():
            for name in names:
                self.add_command(LazyCommand(name, *COMMANDS[name], group))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="NoETL playbooks on Dagster: run them, watch them, resume them.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noetl-dagster {__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command; each is complete in its callback."""


def _variable(setting: str | int, *below: str | int) -> str:
    return ".".join((f"NOETL_{setting}".upper(), *map(str, below)))


def set_up_process(settings: Settings) -> None:
    """Sets up the collector, secrets and logs of a process of the command line."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    hide_from_children()
    logs.set_up(settings)
    if settings.log_format is LogFormat.JSON:
        notes_become_records()


def main() -> None:
    """Entry point of ``noetl-dagster``: errors raised on purpose become one line and exit code 1."""
    try:
        settings = get_settings()
    except ValidationError as error:  # its own text would show the value, which may be a secret
        fail("\n".join(f"{_variable(*one['loc'])}: {one['msg']}" for one in error.errors()), code=2)
    set_up_process(settings)
    try:
        app()
    except NoetlError as error:
        fail(str(error))
    except BrokenPipeError:
        sys.exit(1)
