"""The end of a program without the interpreter's clean-up loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from noetl_dagster.process.ending import call_as_program
import atexit, sys, threading, time

opened = open("forgotten", "w")

def late():
    time.sleep(0.1)
    print("a thread")

def main():
    opened.write("written")
    threading.Thread(target=late).start()
    atexit.register(print, "at exit")
    print("begun")
    END

call_as_program(main)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("raise ValueError", 1)]
)
def test_what_a_program_has_done_is_complete(end: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("END", end)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, "begun\na thread\nat exit\n"), done.stderr
    assert (tmp_path / "forgotten").read_text() == "written"
    assert ("why" in done.stderr, "ValueError" in done.stderr) == ("why" in end, "ValueError" in end)


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("END", "")],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
