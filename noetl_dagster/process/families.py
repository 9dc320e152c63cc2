"""Ends a process together with all processes that it started, also those that have left its group and its session."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "NOETL_PROCESSES"
"""Environment variable whose value all processes of a family inherit, and by which Linux finds orphaned ones."""

ROUNDS = 10
"""Searches for processes that start while others are killed, at most."""


class Family:
    """The processes that one process has started, and those that they have started. It is made before the first.

    Attributes:
        mark: the value of :data:`MARK` in the environment of the first.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._others = set(psutil.pids())

    async def end(self, leader: int, patience: float) -> None:
        """Ends the leader of a group, its group, its descendants, and the processes with the mark.

        Args:
            patience: seconds between SIGTERM and SIGKILL; 0 for a leader that has ended.
        """
        family: list[psutil.Process] = []
        if patience:
            with suppress(psutil.Error):
                family = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
            family += self._search()[0]
            await _signal(family, signal.SIGTERM, patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        for _ in range(ROUNDS):
            marked, is_complete = self._search()
            family = living([*family, *marked])
            if is_complete and not family:
                return
            await _signal(family, signal.SIGKILL, 1)

    def _search(self) -> tuple[list[psutil.Process], bool]:
        """Returns the processes with the mark, and whether these are all. Systems other than Linux have no search.

        Another search is necessary after one has ended, since it may have started another, and if one replaces its
        program just now, since its variables cannot be read then.
        """
        marked: list[psutil.Process] = []
        is_complete, mark = True, self.mark.encode()
        for pid in psutil.pids() if psutil.LINUX else ():
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes()  # psutil would read more files
            except PermissionError:
                continue
            except OSError:
                variables = b""
            if mark in variables:
                is_complete = False
                with suppress(psutil.NoSuchProcess):
                    marked.append(psutil.Process(pid))
            elif not variables and pid not in self._others:
                is_complete = False
                self._others.add(pid)
        return marked, is_complete


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that have not ended. A zombie has: process 1 of a container may take seconds to reap it."""
    alive = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


async def _signal(processes: Iterable[psutil.Process], number: signal.Signals, seconds: float) -> None:
    """Sends a signal to processes and waits for their end, at most so many seconds."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
    clock = asyncio.get_running_loop().time
    deadline, is_over = clock() + seconds, False
    while not is_over:
        await asyncio.sleep(0.02)
        is_over = not living(processes) or clock() > deadline
