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
from tests import forked
from tests.forked import Forked


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


StartProcess = Callable[..., Any]


@contextmanager
def killed_in_the_end() -> Iterator[StartProcess]:
    """Gives ``forked.start``; the processes and their children end with the block."""
    started: list[Forked | subprocess.Popen[Any]] = []

    def start(arguments: list[str], **options: Any) -> Forked | subprocess.Popen[Any]:
        started.append(forked.start(arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
