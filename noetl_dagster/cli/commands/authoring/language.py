"""``check`` and ``schema``: the language of playbooks, without running any."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from noetl_dagster.cli.console import fail
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_report
from noetl_dagster.playbook.schema import language_schema


def check(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    lenient: Annotated[bool, typer.Option(help="report unsupported tool kinds as warnings")] = False,
) -> None:
    """Find the mistakes of playbooks without running them; prints ``file:line:column: message``."""
    errors = 0
    for path in paths:
        if not path.exists():
            fail(f"{path}: no such file or folder")
        for file in find_playbooks(path) if path.is_dir() else [path]:
            _, problems = load_report(file, lenient=lenient, code=True)
            errors += sum(problem.severity == "error" for problem in problems)
            for problem in problems:
                typer.echo(str(problem))
            if not problems:
                typer.echo(f"{file}: ok")
    raise typer.Exit(1 if errors else 0)


def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors."""
    typer.echo(orjson.dumps(language_schema(), option=orjson.OPT_INDENT_2).decode())
