"""``init`` and ``new``: commented starts of projects, playbooks and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster import __version__
from noetl_dagster.cli.console import fail
from noetl_dagster.code_location.scaffold.playbook import new_playbook, new_step, with_step
from noetl_dagster.code_location.scaffold.project import new_project
from noetl_dagster.playbook.loader import parse_playbook

Name = Annotated[str, typer.Argument(metavar="NAME")]

app = typer.Typer(
    name="new", no_args_is_help=True, help="Write a commented start of a playbook, or of a step in one."
)


def init(folder: Annotated[Path, typer.Argument(help="of the new project")]) -> None:
    """Make a project that works: a playbook, the Definitions that load it, and a test that runs it."""
    for path in new_project(folder, __version__):
        typer.echo(str(path))
    typer.echo(f"\nGo on with {folder / 'README.md'}")


@app.command()
def playbook(
    name: Name,
    folder: Annotated[Path, typer.Option(help="where it is written")] = Path("playbooks"),
) -> None:
    """Write a playbook of two steps, which runs as it is."""
    if not name.replace("-", "_").isidentifier():
        fail(f"{name!r} is no name for a playbook: letters, digits, - and _", code=2)
    file = folder / f"{name}.yaml"
    if file.exists():
        fail(f"{file} is there already; give another name")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(
        new_playbook(name, path=f"{_project_of(folder)}/{name}", file=str(file)), encoding="utf-8"
    )
    typer.echo(str(file))


def _project_of(folder: Path) -> str:
    """What the keys of a folder's playbooks begin with: its own name, or the project's above ``playbooks``."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "playbooks" else folder.name


@app.command()
def step(
    file: Annotated[
        Path, typer.Argument(help="playbook file", exists=True, dir_okay=False, metavar="PLAYBOOK")
    ],
    name: Name,
    kind: Annotated[
        str, typer.Option(help="of its tool: python, http, postgres, duckdb, spark, ...")
    ] = "python",
) -> None:
    """Write a step at the end of a playbook's workflow; let an arc of another lead to it."""
    if not name.isidentifier():
        fail(f"{name!r} is no name for a step that templates can say: letters, digits and _", code=2)
    text = file.read_text(encoding="utf-8")
    if any(one.name == name for one in parse_playbook(text, file=str(file)).steps):
        fail(f"{file} has a step {name} already; give another name")
    file.write_text(with_step(text, new_step(name, kind), str(file)), encoding="utf-8")
    typer.echo(f"{file}: {name}; lead to it with next: [{name}]")
