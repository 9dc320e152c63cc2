"""shell and script: exit codes, bounds, and ends of whole process groups."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.commands.processes import run_process
from tests.waiting import PATIENCE_SECONDS, ended, until


async def test_commands_share_a_shell_and_stop_at_a_failure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_CREDENTIAL_X", "hidden")

    data = (
        await run("shell", cmds=["X=1", "echo $X $Y", "env | grep -c ^NOETL_CREDENTIAL || true"], env={"Y": 2})
    ).data
    with pytest.raises(ToolError, match="exit code 3: oops") as caught:
        await run("shell", cmds="echo oops >&2\n(exit 3)\necho never")

    assert data == {"exit_code": 0, "stdout": "1 2\n0\n", "stderr": "", "truncated": False}
    assert (caught.value.kind, caught.value.code) == ("unknown", 3)


async def test_the_whole_group_is_killed(run: Any, tmp_path: Path) -> None:
    call = asyncio.create_task(run("shell", cmds="sleep 600 & echo $! > child; wait"))
    child = tmp_path / "child"
    pid = int(await until(lambda: child.exists() and child.read_text().strip()))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    await until(lambda: ended(pid))


@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_group_that_is_only_starting_is_ended_too(turns: int, tmp_path: Path) -> None:
    """Cancelled after so many turns of the event loop, which is too busy to see that the process has begun."""
    child = tmp_path / "child"
    command = ["bash", "-c", "sleep 600 & echo $! > child; wait"]
    call = asyncio.create_task(run_process(command, folder=tmp_path, env={"PATH": os.environ["PATH"]}))
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(50):
        if child.exists() and child.read_text():
            break
        time.sleep(0.02)  # noqa: ASYNC251
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, PATIENCE_SECONDS)

    await until(lambda: not at_work_in(tmp_path), "the end of the group")


def at_work_in(folder: Path) -> list[int]:
    """The processes, of those that run, whose working directory is this folder."""
    found = psutil.process_iter(["cwd", "status"])
    return [one.pid for one in found if one.info["cwd"] == str(folder) and one.info["status"] != psutil.STATUS_ZOMBIE]


async def test_long_output_keeps_its_end(run: Any) -> None:
    data = (await run("shell", cmds="yes | head -c 5000000; echo end")).data

    assert data["truncated"]
    assert len(data["stdout"]) == 1_048_576
    assert data["stdout"].endswith("end\n")


async def test_scripts_choose_their_interpreter(run: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import json, os, sys\nprint(json.loads(os.environ['NOETL_INPUT'])['n'], sys.argv[1:])"
    )

    data = (await run("script", script="job.py", args=["a"], input={"n": 4})).data
    inline = (await run("script", code="#!/bin/sh\necho $1", args=["b"])).data

    assert data["stdout"] == "4 ['a']\n"
    assert inline["stdout"] == "b\n"
    with pytest.raises(ToolError, match="is not there"):
        await run("script", script="missing.sh")
