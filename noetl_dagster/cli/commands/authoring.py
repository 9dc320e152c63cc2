"""``migrate``, ``init`` and ``new``: playbooks rewritten in today's words, and commented starts of new ones."""

from __future__ import annotations

import os
import tempfile
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster import __version__
from noetl_dagster.cli.commands.check import playbook_files
from noetl_dagster.cli.console import fail, warn
from noetl_dagster.code_location.scaffold import new_playbook, new_project, new_step, with_step
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.migration.rewriting import migrate as migrated


def migrate(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit code 1 when something would change")
    ] = False,
) -> None:
    """Rewrite playbooks in the words of today; prints what changes, and keeps comments, order and styles."""
    changed = stuck = 0
    for path in paths:
        for file in playbook_files(path):
            text = _read(file)
            migration = migrated(text, str(file))
            for problem in migration.problems:
                warn(str(problem))
            stuck += any(problem.severity == "error" for problem in migration.problems)
            if migration.text == text:
                continue
            changed += 1
            typer.echo(_difference(text, migration.text, file), nl=False)
            if not check:
                _write(file, migration.text)
    raise typer.Exit(1 if stuck or (check and changed) else 0)


def _read(file: Path) -> str:
    """The text with the ends of its lines as they are."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: cannot be read: {error}")


def _difference(before: str, after: str, file: Path) -> str:
    lines = unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _write(file: Path, text: str) -> None:
    """All of the text or nothing, whatever ends the process."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    fresh = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        fresh.chmod(file.stat().st_mode)
        fresh.replace(file.resolve())
    finally:
        fresh.unlink(missing_ok=True)


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
    """Returns the key prefix of a folder's playbooks: its name, or that of the project above ``playbooks``."""
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
