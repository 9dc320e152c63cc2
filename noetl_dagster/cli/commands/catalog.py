"""``register``: playbooks as versions of their paths, so that they run without their files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster.cli.commands.check import playbook_files
from noetl_dagster.cli.console import Json, fail, note, print_json
from noetl_dagster.cli.session import open_session
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.catalog import PlaybookDraft, draft_of
from noetl_dagster.process.event_loop import run_sync


def register(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    as_json: Json = False,
) -> None:
    """Register playbooks as versions, which then run without their files.

    Content that differs from the latest version of its path becomes the next version. Invalid playbooks are refused
    with their problems and exit code 1; the others are registered nevertheless.
    """
    files: list[Path] = []
    for path in paths:
        found = playbook_files(path, code=2)
        if not found:
            fail(f"{path}: no playbooks in it (YAML with 'kind: Playbook')", code=2)
        files += found
    drafts, refused = _drafts(files)
    done = []
    if drafts:
        with open_session(quickly=True) as session:
            registered = session.engine.runtime.registered
            for file, draft in drafts.items():
                done.append((file, run_sync(registered.register(draft))))
    if as_json:
        rows = [
            {
                "file": str(file),
                "new": one.new,
                **one.version.model_dump(mode="json", exclude={"content", "meta"}),
            }
            for file, one in done
        ]
        print_json({"registered": rows, "refused": refused})
    else:
        for file, one in done:
            state = "registered" if one.new else "is the latest already"
            typer.echo(f"{one.version.reference}  {state}  {file}")
    for problem in refused:
        note(problem, style="red", level=logging.ERROR)
    raise typer.Exit(1 if refused else 0)


def _drafts(files: list[Path]) -> tuple[dict[Path, PlaybookDraft], list[str]]:
    """Returns the valid playbooks by file, and the problems of the others."""
    drafts: dict[Path, PlaybookDraft] = {}
    refused: list[str] = []
    for file in dict.fromkeys(files):
        try:
            drafts[file] = draft_of(file.read_text(encoding="utf-8-sig"), file=str(file))
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
