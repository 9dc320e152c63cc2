"""``migrate``: playbooks in older words, rewritten in today's."""

from __future__ import annotations

import os
import tempfile
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster.cli.commands.authoring.language import playbook_files
from noetl_dagster.cli.console import fail, warn
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
