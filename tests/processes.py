"""Processes that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from noetl_dagster.launcher.address import Address


def end_run_servers(folder: Path) -> None:
    """Kills the run servers of a folder, and what they drive."""
    for path in folder.glob("*.sock"):
        channel = Address(folder, path.stem, {}, 0).connect()
        if channel is not None:
            channel.send({"do": "status"})
            status = channel.receive() or {"drivers": [], "pid": 0}
            for pid in filter(None, [*status["drivers"], status["pid"]]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            channel.close()


StartProcess = Callable[..., subprocess.Popen[Any]]


@contextmanager
def killed_in_the_end() -> Iterator[StartProcess]:
    """Gives what starts processes, each in a session of its own; they and their children end with the block."""
    started: list[subprocess.Popen[Any]] = []

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[Any]:
        started.append(
            subprocess.Popen(arguments, stderr=subprocess.STDOUT, start_new_session=True, **options)
        )
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
