"""The output of the command line."""

from __future__ import annotations

import io
import logging
import sys
from typing import NoReturn

import orjson
import typer
from pydantic import BaseModel
from rich.console import Console

logger = logging.getLogger(__name__)

PIPE_WIDTH = 120
"""Columns of output that goes to a file or a pipe."""

console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
"""Results, on standard output."""

notes = Console(stderr=True)
"""Progress and remarks, on standard error, so that ``--json`` stays clean."""


class _Records(io.StringIO):
    """Takes the place of standard error where that holds JSON lines: each line of text becomes a record."""

    def write(self, text: str) -> int:
        for line in filter(str.strip, text.splitlines()):
            logger.info("%s", line.rstrip())
        return len(text)


def notes_become_records() -> None:
    """Standard error belongs to the log from now on: remarks are warnings of it, and progress is information."""
    notes.file = _Records()
    notes.width = 1_000_000  # one remark, one line


def warn(message: str) -> None:
    """Prints a remark on standard error that the user should see."""
    if isinstance(notes.file, _Records):
        logger.warning("%s", message)
    else:
        notes.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints a message on standard error and ends the program."""
    if isinstance(notes.file, _Records):
        logger.error("%s", message)
    else:
        notes.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)


def print_json(model: BaseModel | dict[str, object] | list[object]) -> None:
    """One JSON document on standard output."""
    plain = model.model_dump(mode="json") if isinstance(model, BaseModel) else model
    typer.echo(orjson.dumps(plain, option=orjson.OPT_INDENT_2, default=str).decode())
