"""What continuous integration runs is pinned."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_actions_are_pinned_by_commit() -> None:
    workflows = list((PROJECT / ".github" / "workflows").glob("*.y*ml"))
    used = [line for path in workflows for line in re.findall(r"uses:\s*(.+)", path.read_text())]
    assert used
    assert [action for action in used if not re.match(r"[\w./-]+@[0-9a-f]{40}\b", action)] == []


def test_locks_pin_versions_and_hashes() -> None:
    for path in PROJECT.glob("requirements*.lock"):
        packages = re.findall(r"(?m)^[a-zA-Z0-9].*(?:\n +--hash=.*)*", path.read_text())
        assert packages
        assert [one for one in packages if "==" not in one or "--hash=sha256:" not in one] == []
