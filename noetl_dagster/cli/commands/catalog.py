"""``register``: playbooks as versions of their paths, so that they run without their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster.cli.commands.executions import Json
from noetl_dagster.cli.console import fail, notes, print_json
from noetl_dagster.cli.session import open_session
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.catalog import PlaybookDraft, draft_of
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.process.event_loop import run_sync


def register(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    as_json: Json = False,
) -> None:
    """Register playbooks as versions of their paths, which then run without their files.

    A content that is not the latest of its path becomes the next version. Broken ones are refused with their
    problems, and exit code 1; the others are registered all the same.
    """
    files = [file for path in paths for file in _files(path)]
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
            typer.echo(
                f"{one.version.reference}  {'registered' if one.new else 'is the latest already'}  {file}"
            )
    for problem in refused:
        notes.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if refused else 0)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        fail(f"{path}: no such file or folder", code=2)
    found = find_playbooks(path) if path.is_dir() else [path]
    if not found:
        fail(f"{path}: no playbooks in it (YAML with 'kind: Playbook')", code=2)
    return found


def _drafts(files: list[Path]) -> tuple[dict[Path, PlaybookDraft], list[str]]:
    """By file what may be registered, and what is wrong with the others."""
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
