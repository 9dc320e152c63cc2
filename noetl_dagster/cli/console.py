"""The output of the command line."""

from __future__ import annotations

import io
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NoReturn

import orjson
import typer
from pydantic import BaseModel
from rich.console import Console

from noetl_dagster.engine.executions.addresses import execution_url, executions_url
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)

PIPE_WIDTH = 120
"""Columns of output that goes to a file or a pipe."""

console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
"""Results, on standard output."""

notes = Console(stderr=True)
"""Progress and remarks, on standard error, so that ``--json`` stays clean."""


Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


class _Records(io.StringIO):
    """Takes the place of standard error where that holds JSON lines: each line of text becomes a record."""

    def write(self, text: str) -> int:
        for line in filter(str.strip, text.splitlines()):
            logger.info("%s", line.rstrip())
        return len(text)


def notes_become_records() -> None:
    """Makes every remark a record of the log, with its level; progress has the level INFO."""
    notes.file = _Records()
    notes.width = 1_000_000  # one remark, one line


def note(message: str, *, style: str | None = None, level: int = logging.INFO) -> None:
    """Prints a remark on standard error; ``level`` counts if the log takes it instead."""
    if isinstance(notes.file, _Records):
        logger.log(level, "%s", message)
    else:
        notes.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    note(message, style="yellow", level=logging.WARNING)


def note_page(settings: Settings, execution_id: int | str | None = None) -> None:
    """Prints the address of an execution's page, or of the list, and how to start the pages of this machine."""
    address = executions_url(settings) if execution_id is None else execution_url(settings, execution_id)
    is_default = not {"pages_url", "server_url"} & settings.model_fields_set
    note(f"page: {address}" + (", while 'noetl-dagster serve' runs" if is_default else ""))


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ends the program without a message on Ctrl-C, for commands that only read."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints an error on standard error, without secrets, and ends the program."""
    note(SECRETS.redact(message), style="red", level=logging.ERROR)
    raise SystemExit(code)


def print_json(model: BaseModel | dict[str, object] | list[object]) -> None:
    """Prints one JSON document on standard output."""
    plain = model.model_dump(mode="json") if isinstance(model, BaseModel) else model
    typer.echo(orjson.dumps(plain, option=orjson.OPT_INDENT_2, default=str).decode())


def announce_start(names: Sequence[str]) -> None:
    """Prints which embedded services start now: the first start takes some seconds."""
    note(f"starting the embedded services: {', '.join(name.replace('_', ' ') for name in names)} ...")


async def warn_of_stores(settings: Settings) -> None:
    """Creates missing buckets where that is allowed, and warns of stores that cannot be used.

    A service starts nevertheless: it stores results elsewhere, or fails with the same message.
    """
    from noetl_dagster.storage.tiers import unready  # obstore, which most commands do not need

    for line in await unready(settings):
        warn(f"warning: {line}")
