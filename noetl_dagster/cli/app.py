"""The commands, and what every one of them does with errors."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from noetl_dagster.cli import executions
from noetl_dagster.cli.console import fail
from noetl_dagster.cli.control import maintain, project, reap
from noetl_dagster.cli.demo import demo
from noetl_dagster.cli.documents import settings as show_settings
from noetl_dagster.cli.ingest import ingest
from noetl_dagster.cli.replay import replay
from noetl_dagster.cli.run import resume, run
from noetl_dagster.cli.serve import serve
from noetl_dagster.cli.worker import worker
from noetl_dagster.embedded.cli import app as services
from noetl_dagster.errors import NoetlError, PlaybookError
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import load_report
from noetl_dagster.playbook.schema import language_schema
from noetl_dagster.records_api.__main__ import serve as records_api
from noetl_dagster.settings import get_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="NoETL playbooks on Dagster: run them, watch them, resume them.",
)
app.add_typer(services, name="services")
app.command()(run)
app.command()(resume)
app.command()(executions.status)
app.command()(executions.events)
app.command()(executions.cancel)
app.command("executions")(executions.listing)
app.command()(demo)
app.command("settings")(show_settings)
app.command()(ingest)
app.command()(worker)
app.command()(serve)
app.command()(project)
app.command()(replay)
app.command()(reap)
app.command()(maintain)
app.command("records-api")(records_api)


@app.command()
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


@app.command()
def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors."""
    typer.echo(orjson.dumps(language_schema(), option=orjson.OPT_INDENT_2).decode())


def main() -> None:
    """Entry point of ``noetl-dagster``: errors raised on purpose become one line and exit code 1."""
    logging.basicConfig(level=get_settings().log_level, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except PlaybookError as error:
        fail(str(error))
    except NoetlError as error:
        fail(str(error))
    except BrokenPipeError:
        sys.exit(1)
