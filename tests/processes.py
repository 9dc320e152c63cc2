"""Processes that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
