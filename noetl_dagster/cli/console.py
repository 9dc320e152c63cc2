"""Where the command line writes, and how."""

from __future__ import annotations

import sys
from typing import NoReturn

import orjson
import typer
from pydantic import BaseModel
from rich.console import Console

PIPE_WIDTH = 120
"""Columns of output that goes to a file or a pipe."""

console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
"""Results, on standard output."""

notes = Console(stderr=True)
"""Progress and remarks, on standard error, so that ``--json`` stays clean."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints a message on standard error and ends the program."""
    notes.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)


def print_json(model: BaseModel | dict[str, object] | list[object]) -> None:
    """One JSON document on standard output."""
    plain = model.model_dump(mode="json") if isinstance(model, BaseModel) else model
    typer.echo(orjson.dumps(plain, option=orjson.OPT_INDENT_2, default=str).decode())
