"""Loading a folder is linear in the number of its playbooks: calls are counted, not seconds."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.code_location.definitions import build_definitions
from noetl_dagster.settings import Settings
from tests.forked import result_of, run
from tests.playbooks import text_of

FLOW = """\
dagster:
  partitions: {{kind: daily, start: "2026-01-01", workload: day}}
  schedules: [{{name: nightly, cron: "0 2 * * *"}}]
workload: {{day: null}}
workflow:
  - step: start
    tool: {{kind: noop}}
    next: [items, side]
  - step: items
    {reads}
    loop: {{in: "{{{{ [1, 2] }}}}", iterator: item}}
    spec: {{loop_mode: fanout}}
    tool: {{kind: python, input: {{item: "{{{{ item }}}}"}}, code: "result = item"}}
    next: [last]
  - step: side
    asset: false
    tool: {{kind: noop}}
    next: [last]
  - step: last
    checks: [{{unique: a, blocking: true}}, {{when: "{{{{ output | length >= 1 }}}}"}}]
    tool: {{kind: python, input: {{items: "{{{{ items }}}}"}}, code: "result = [{{'a': 1}}]"}}
"""


def folder_of(folder: Path, count: int) -> Path:
    """A folder of so many playbooks, each of which reads what the one before it makes."""
    folder.mkdir()
    for number in range(count):
        reads = f"from: {{before: tests/flow_{number - 1}/last}}" if number else "desc: The first"
        (folder / f"flow_{number}.yaml").write_text(text_of(f"flow_{number}", FLOW.format(reads=reads)))
    return folder


def calls(folder: Path) -> int:
    """Calls, of Python and of C functions, that building definitions makes for the second time."""
    build_definitions(Settings(playbooks_path=folder))  # imports and caches
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        build_definitions(Settings(playbooks_path=folder))
    finally:
        sys.setprofile(None)
    return count


def test_loading_is_linear(tmp_path: Path) -> None:
    few, many = folder_of(tmp_path / "few", 6), folder_of(tmp_path / "many", 24)
    assert result_of(calls, many) < 4 * result_of(calls, few) * 1.1


def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dagster makes of each schedule is asked for once."""
    from noetl_dagster.compiler import job

    made: list[str] = []

    def counted(plan: Any, *rest: Any) -> Any:
        made.append(plan.name)
        return schedule_of(plan, *rest)

    schedule_of = job._schedule
    monkeypatch.setattr(job, "_schedule", counted)
    build_definitions(Settings(playbooks_path=folder_of(tmp_path / "flows", 3)))
    assert sorted(made) == ["flow_0", "flow_1", "flow_2"]


def test_no_garbage_is_looked_for_meanwhile(tmp_path: Path) -> None:
    """The larger the location, the longer each look takes: a third of the whole."""
    folder, looks = folder_of(tmp_path / "flows", 20), []
    gc.callbacks.append(lambda phase, facts: looks.append((phase, facts["generation"])))
    try:
        build_definitions(Settings(playbooks_path=folder))
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert len(looks) <= 2, "one look, when it is over"


def test_loading_warns_of_nothing(tmp_path: Path) -> None:
    """A warning for each step of each playbook would be thousands of lines in front of the user."""
    environment = {**os.environ, "NOETL_PLAYBOOKS_PATH": str(folder_of(tmp_path / "flows", 2))}
    code = "import noetl_dagster.definitions"
    loaded = run("-c", code, environment=environment, folder=tmp_path, texts=tmp_path)
    assert (loaded.returncode, loaded.stderr) == (0, "")
