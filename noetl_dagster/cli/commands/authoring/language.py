"""``check`` and ``schema``: the language of playbooks, without running any."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from noetl_dagster.cli.commands.authoring.reports import ReportFormat, report
from noetl_dagster.cli.console import fail
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_report
from noetl_dagster.playbook.schema import language_schema


def check(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    lenient: Annotated[
        bool, typer.Option(help="report unsupported tool kinds and unknown fields of tools as warnings")
    ] = False,
    format: Annotated[
        ReportFormat,
        typer.Option(
            help="text: ``file:line:column: message``, and of several playbooks a summary; "
            "github: commands that annotate a pull request; json: a list; sarif: a log of SARIF 2.1.0"
        ),
    ] = ReportFormat.TEXT,
) -> None:
    """Find the mistakes of playbooks without running them; exit code 1 when there are errors."""
    findings = {
        str(file): load_report(file, lenient=lenient, code=True)[1]
        for path in paths
        for file in playbook_files(path)
    }
    typer.echo(report(findings, format))
    errors = any(problem.severity == "error" for found in findings.values() for problem in found)
    raise typer.Exit(1 if errors else 0)


def playbook_files(path: Path) -> list[Path]:
    """A file itself, or the playbooks of a folder; ends the program where there is neither."""
    if not path.exists():
        fail(f"{path}: no such file or folder")
    return find_playbooks(path) if path.is_dir() else [path]


def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors."""
    typer.echo(orjson.dumps(language_schema(), option=orjson.OPT_INDENT_2).decode())
