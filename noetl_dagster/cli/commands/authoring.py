"""``register``, ``init`` and ``new``: registers playbooks, and creates projects and playbooks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster import __version__
from noetl_dagster.cli.commands.check import Lenient, playbook_files
from noetl_dagster.cli.console import Json, fail, note, print_json, warn
from noetl_dagster.code_location.scaffold import copy_example, new_playbook, new_project
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.catalog import PlaybookDraft, draft_of

Paths = Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")]


def register(paths: Paths, lenient: Lenient = False, as_json: Json = False) -> None:
    """Register playbooks as versions, which then run without their files.

    Content that differs from the latest version of its path becomes the next version. A version that you register with
    --lenient also runs leniently. Invalid playbooks are refused with their problems, and the exit code is 1. Valid
    playbooks of the same command are registered.
    """
    # the engine takes long to import, and the other commands do not need it
    from noetl_dagster.cli.session import open_session
    from noetl_dagster.process.event_loop import run_sync

    files: list[Path] = []
    for path in paths:
        playbooks = playbook_files(path, code=2)
        if not playbooks:
            fail(f"{path}: contains no playbooks (YAML with 'kind: Playbook')", code=2)
        files += playbooks
    drafts, refused = _drafts(files, lenient=lenient)
    done = []
    if drafts:
        with open_session(quickly=True) as session:
            registered = session.engine.runtime.registered
            for file, draft in drafts.items():
                done.append((file, draft, run_sync(registered.register(draft))))
    if as_json:
        rows = [
            {
                "file": str(file),
                "new": one.new,
                "warnings": draft.warnings,
                **one.version.model_dump(mode="json", exclude={"content", "meta"}),
            }
            for file, draft, one in done
        ]
        print_json({"registered": rows, "refused": refused})
    else:
        for file, draft, one in done:
            for warning in draft.warnings:
                warn(f"{file}: warning: {warning}")
            state = "registered" if one.new else "is already the latest"
            typer.echo(f"{one.version.reference}  {state}  {file}")
    for problem in refused:
        note(problem, style="red", level=logging.ERROR)
    raise typer.Exit(1 if refused else 0)


def _drafts(files: list[Path], *, lenient: bool) -> tuple[dict[Path, PlaybookDraft], list[str]]:
    """Returns the valid playbooks by file, and the problems of the others."""
    drafts: dict[Path, PlaybookDraft] = {}
    refused: list[str] = []
    for file in dict.fromkeys(files):
        try:
            drafts[file] = draft_of(file.read_text(encoding="utf-8-sig"), file=str(file), lenient=lenient)
        except PlaybookError as error:
            refused.append(str(error))
        except (OSError, UnicodeDecodeError) as error:
            refused.append(f"{file}: cannot be read: {error}")
    for path in {draft.path for draft in drafts.values()}:
        same = [file for file, draft in drafts.items() if draft.path == path]
        if len(same) > 1:
            refused.append(f"{' and '.join(map(str, same))} have the same metadata.path {path!r}; rename one")
            drafts = {file: draft for file, draft in drafts.items() if draft.path != path}
    return drafts, refused


def init(
    folder: Annotated[Path, typer.Argument(help="folder of the new project")],
    example: Annotated[str | None, typer.Option(help="copy this example; an unknown name lists them")] = None,
) -> None:
    """Create a working project: a playbook, its Definitions and a test; or a copy of an example."""
    made = new_project(folder, __version__) if example is None else copy_example(folder, example)
    for path in made:
        typer.echo(str(path))
    typer.echo(f"\nContinue with {folder / 'README.md'}")


def new(
    name: Annotated[str, typer.Argument(help="name of the new playbook", metavar="NAME")],
    folder: Annotated[Path, typer.Option(help="folder of the file")] = Path("playbooks"),
) -> None:
    """Write a commented playbook of two steps that can run at once."""
    if not name.replace("-", "_").isidentifier():
        fail(f"{name!r} is not a valid name for a playbook: use letters, digits, - and _", code=2)
    file = folder / f"{name}.yaml"
    if file.exists():
        fail(f"{file} already exists; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    project = place.parent.name if place.name == "playbooks" else place.name
    file.write_text(new_playbook(name, path=f"{project}/{name}", file=str(file)), encoding="utf-8")
    typer.echo(str(file))
