"""The commands of ``noetl-dagster``, loaded when they are called, and their error handling."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from noetl_dagster import __version__
from noetl_dagster.cli.console import fail, notes_become_records
from noetl_dagster.errors import NoetlError
from noetl_dagster.process import logs
from noetl_dagster.settings import LogFormat, get_settings


class CommandPlace(NamedTuple):
    """The definition of a command, as ``module:function`` or ``module:app``, and its line in the overview."""

    target: str
    help: str


class LazyCommand(TyperCommand):
    """Represents a command in its group's overview, and loads the real one when it is called."""

    def __init__(self, name: str, place: CommandPlace) -> None:
        super().__init__(name, help=place.help)
        self._target = place.target

    def load(self) -> Any:
        """The command itself, a ``TyperCommand`` or a ``TyperGroup``."""
        module, _, attribute = self._target.partition(":")
        defined = getattr(import_module(module), attribute)
        if isinstance(defined, typer.Typer):
            return get_command(defined)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(defined)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Imports the command and parses its arguments."""
        return self.load().make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """A group of lazy commands, in the order of :attr:`places`."""

    places: ClassVar[Mapping[str, CommandPlace]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, place in self.places.items():
            self.add_command(LazyCommand(name, place))


COLLECT_AFTER = 20_000
"""Objects until the collector looks for garbage: imports make hundreds of thousands and leave none."""


class Commands(LazyGroup):
    """The commands of ``noetl-dagster``."""

    places: ClassVar[Mapping[str, CommandPlace]] = {
        "run": CommandPlace(
            "noetl_dagster.cli.commands.run:run",
            "Run a playbook as its Dagster job; exit code 0 when it completes, 1 when it does not.",
        ),
        "resume": CommandPlace(
            "noetl_dagster.cli.commands.run:resume",
            "Go on with an execution that failed or whose process is gone; nothing that is done runs again.",
        ),
        "status": CommandPlace(
            "noetl_dagster.cli.commands.executions:status",
            "Show how an execution stands: its steps, the counts of its loops, and how the pool does.",
        ),
        "events": CommandPlace(
            "noetl_dagster.cli.commands.executions:events", "Print every event of an execution, oldest first."
        ),
        "cancel": CommandPlace(
            "noetl_dagster.cli.commands.executions:cancel",
            "Stop an execution: nothing more is issued, and running commands are told.",
        ),
        "executions": CommandPlace(
            "noetl_dagster.cli.commands.executions:listing", "List the newest executions."
        ),
        "state": CommandPlace(
            "noetl_dagster.cli.commands.state:app",
            "How far the steps of a playbook have loaded their sources (state), and where they go on.",
        ),
        "check": CommandPlace(
            "noetl_dagster.cli.commands.check:check",
            "Find the mistakes of playbooks without running them; exit code 1 when there are errors.",
        ),
        "migrate": CommandPlace(
            "noetl_dagster.cli.commands.authoring:migrate",
            "Rewrite playbooks in the words of today; prints what changes, and keeps comments, order and styles.",
        ),
        "register": CommandPlace(
            "noetl_dagster.cli.commands.catalog:register",
            "Register playbooks as versions of their paths, which then run without their files.",
        ),
        "schema": CommandPlace(
            "noetl_dagster.cli.commands.check:schema",
            "Print the JSON Schema of the playbook language, for editors.",
        ),
        "init": CommandPlace(
            "noetl_dagster.cli.commands.authoring:init",
            "Make a project that works: a playbook, the Definitions that load it, and a test that runs it.",
        ),
        "new": CommandPlace(
            "noetl_dagster.cli.commands.authoring:app",
            "Write a commented start of a playbook, or of a step in one.",
        ),
        "demo": CommandPlace(
            "noetl_dagster.cli.commands.demo:demo",
            "Run the patient flow against the local records API, faults included, and show what came out.",
        ),
        "serve": CommandPlace(
            "noetl_dagster.cli.commands.serve:serve",
            "Serve the HTTP API that workers claim from, and take worker events from NATS, until interrupted.",
        ),
        "worker": CommandPlace(
            "noetl_dagster.cli.commands.worker:worker",
            "Run commands of steps with ``dispatch: workers`` until interrupted; ends what runs before it goes.",
        ),
        "ingest": CommandPlace(
            "noetl_dagster.cli.commands.ingest:ingest",
            "Move worker events from NATS into the event log until interrupted. Any number may run at once.",
        ),
        "project": CommandPlace(
            "noetl_dagster.cli.commands.upkeep:project",
            "Keep noetl.execution up to date until interrupted. Any number may run at once.",
        ),
        "replay": CommandPlace(
            "noetl_dagster.cli.commands.upkeep:replay", "Rebuild noetl.execution from the event log alone."
        ),
        "reap": CommandPlace(
            "noetl_dagster.cli.commands.upkeep:reap",
            "Give the commands of silent workers to others, until interrupted. Any number may run at once.",
        ),
        "maintain": CommandPlace(
            "noetl_dagster.cli.commands.upkeep:maintain",
            "Make the coming months' partitions, drop old ones (NOETL_RETENTION_DAYS), delete expired results.",
        ),
        "provision": CommandPlace(
            "noetl_dagster.cli.commands.provision:provision",
            "Make what a deployment needs: schema, partitions, streams, buckets, Dagster's storage. Safe twice.",
        ),
        "missing": CommandPlace(
            "noetl_dagster.cli.commands.upkeep:missing",
            "List results that the log knows and whose bytes are gone; exit code 1 when there are any.",
        ),
        "settings": CommandPlace(
            "noetl_dagster.cli.commands.settings:settings",
            "Show the settings of this process; secrets are hidden.",
        ),
        "doctor": CommandPlace(
            "noetl_dagster.cli.commands.settings:doctor",
            "Try every address, credential, folder and program of the settings; exit code 1 when something is wrong.",
        ),
        "services": CommandPlace(
            "noetl_dagster.cli.commands.services:app", "The embedded PostgreSQL, NATS and object store."
        ),
        "records-api": CommandPlace(
            "noetl_dagster.embedded.records_api.__main__:serve",
            "Serve simulated clinical records until interrupted.",
        ),
    }


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
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


def main() -> None:
    """Entry point of ``noetl-dagster``: errors raised on purpose become one line and exit code 1."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    try:
        settings = get_settings()
    except ValidationError as error:  # its own text would show the value, which may be a secret
        fail("\n".join(f"NOETL_{str(one['loc'][0]).upper()}: {one['msg']}" for one in error.errors()), code=2)
    except SettingsError as error:
        fail(f"{error}; write JSON", code=2)
    logs.set_up(settings)
    if settings.log_format is LogFormat.JSON:
        notes_become_records()
    try:
        app()
    except NoetlError as error:
        fail(str(error))
    except BrokenPipeError:
        sys.exit(1)
