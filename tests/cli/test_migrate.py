"""``migrate`` as a user calls it: files are rewritten, or only looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.playbooks import text_of

OLDER = text_of("older", "workflow:\n- step: start\n  tool: {kind: http, endpoint: http://x}   # asks\n")
NEWER = OLDER.replace("endpoint: http://x}", "url: http://x}     ")  # comments stay in their column
BROKEN = text_of("broken", "workflow: [{step: start, args: {a: 1}, tool: {kind: noop}, next: [gone]}]\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "older.yaml").write_text(OLDER)
    (folder / "newer.yaml").write_text(NEWER)
    return folder


def test_older_words_are_rewritten_and_shown(cli: Cli, folder: Path) -> None:
    (folder / "older.yaml").chmod(0o640)

    done = cli("migrate", str(folder))

    assert done.returncode == 0, done.stderr
    assert "-  tool: {kind: http, endpoint: http://x}   # asks\n" in done.stdout
    assert "+  tool: {kind: http, url: http://x}        # asks\n" in done.stdout
    assert "newer.yaml" not in done.stdout
    assert (folder / "older.yaml").read_text() == NEWER
    assert (folder / "older.yaml").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in folder.iterdir()) == ["newer.yaml", "older.yaml"]
    again = cli("migrate", "--check", str(folder))
    assert (again.returncode, again.stdout) == (0, "")


def test_a_check_writes_nothing(cli: Cli, folder: Path) -> None:
    checked = cli("migrate", "--check", str(folder))

    assert checked.returncode == 1
    assert "+  tool: {kind: http, url: http://x}" in checked.stdout
    assert (folder / "older.yaml").read_text() == OLDER


def test_what_cannot_be_rewritten_is_said(cli: Cli, folder: Path) -> None:
    (folder / "broken.yaml").write_text(BROKEN)

    done = cli("migrate", str(folder))

    assert done.returncode == 1
    assert "next leads to unknown step 'gone'" in done.stderr.replace("\n", " ")
    assert (folder / "broken.yaml").read_text() == BROKEN
    assert (folder / "older.yaml").read_text() == NEWER
