"""shell and script: exit codes, bounds, and ends of whole process groups."""

from __future__ import annotations

import asyncio
import os
import signal
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


ESCAPES = {
    "another session": "setsid sleep 600 &",
    "a daemon": "(setsid sh -c 'sleep 600 & echo $! > child' >/dev/null 2>&1 &)",
    "another group": 'python3 -c \'import os; os.setpgid(0, 0); os.execvp("sleep", ["sleep", "600"])\' &',
    "deaf to SIGTERM": "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' &",
}


@pytest.mark.parametrize("commands", ESCAPES.values(), ids=ESCAPES)
async def test_what_a_call_starts_ends_with_it(run: Any, tmp_path: Path, commands: str) -> None:
    """Whether its time is over, or it ends by itself: no process is left that keeps its pipes open."""
    with pytest.raises(ToolError, match="took longer than its timeout of 1 s"):
        await asyncio.wait_for(run("shell", cmds=[commands, "sleep 600"], timeout=1), PATIENCE_SECONDS)
    assert not at_work_in(tmp_path)

    data = (await asyncio.wait_for(run("shell", cmds=[commands, "echo done"]), PATIENCE_SECONDS)).data
    assert data["stdout"] == "done\n"
    assert not at_work_in(tmp_path)


async def test_what_code_in_a_subprocess_starts_ends_with_it(run: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    code = f"import subprocess\nsubprocess.Popen(['sleep', '600'], cwd={folder!r}, start_new_session=True)\nresult = 1"

    assert (await asyncio.wait_for(run("python", code=code, isolation="subprocess"), PATIENCE_SECONDS)).data == 1
    assert not at_work_in(tmp_path)


async def test_a_process_that_hides_does_not_keep_its_call_waiting(run: Any, tmp_path: Path) -> None:
    """It has left group and session, has another environment, and its parent has ended."""
    pid = tmp_path / "pid"
    hidden = f"env -i /bin/sh -c 'echo $$ > {pid}; exec sleep 600' &"

    data = (
        await run("shell", cmds=[f"(setsid {hidden})", f"until test -s {pid}; do sleep 0.02; done", "echo done"])
    ).data

    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert data["stdout"] == "done\n"


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

    note, _, text = data["stdout"].partition("\n")
    assert data["truncated"]
    assert note == "[the first 3,951,428 bytes are left out; write long output to a file]"
    assert len(text) == 1_048_576
    assert text.endswith("end\n")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (r"a\n\351", "stdout is no UTF-8 text, since line 2 has the byte 0xe9; .* with iconv or base64"),
        (r"a\000b", "stdout is no UTF-8 text, since line 1 has the byte 0x00"),
    ],
)
async def test_output_that_is_no_text_is_refused(run: Any, output: str, message: str) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        await run("shell", cmds=f"printf '{output}'")
    data = (await run("shell", cmds=f"printf '{output}' >&2")).data

    assert caught.value.code == "VALUE"
    assert ": bytes that are no UTF-8 text are replaced with U+FFFD]\na" in data["stderr"]
    assert "\ufffd" in data["stderr"]


async def test_long_output_begins_with_a_whole_character(run: Any) -> None:
    data = (await run("shell", cmds="head -c 1048576 /dev/zero | tr '\\0' x; printf 'é%.0s' $(seq 600000)")).data

    assert data["stdout"].partition("\n")[2].strip("é") == ""


async def test_scripts_choose_their_interpreter(run: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import json, os, sys\nprint(json.loads(os.environ['NOETL_INPUT'])['n'], sys.argv[1:])"
    )

    data = (await run("script", script="job.py", args=["a"], input={"n": 4})).data
    inline = (await run("script", code="#!/bin/sh\necho $*", args=["b", True, None, {"c": 1}])).data

    assert data["stdout"] == "4 ['a']\n"
    assert inline["stdout"] == 'b true {"c":1}\n'
    with pytest.raises(ToolError, match="is not there"):
        await run("script", script="missing.sh")
