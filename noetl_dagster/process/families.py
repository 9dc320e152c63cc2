"""Ends a process together with all processes that it started, also those that have left its group and its session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "NOETL_PROCESSES"
"""Environment variable whose value all processes of a family inherit, and by which Linux finds orphaned ones."""

ROUNDS = 10
"""Searches for processes that start while others are killed, at most."""

ROUND_SECONDS = 0.01
_CLOCK_SECONDS = 2.0  # by which the start of a process seems earlier, at most


@dataclass(slots=True)
class Family:
    """The processes that one process has started, and those that they have started. It is made before the first.

    Attributes:
        mark: the value of :data:`MARK` in the environment of the first.
    """

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _begun: float = field(default_factory=time.time)
    _others: set[int] = field(default_factory=set)

    async def end(self, leader: int, patience: float) -> None:
        """Ends the leader of a group, its group, its descendants, and the processes with the mark.

        Args:
            patience: seconds between SIGTERM and SIGKILL; 0 for a leader that has ended.
        """
        family: list[psutil.Process] = []
        if patience:
            with suppress(psutil.Error):
                family = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
            family += self._search(leader)[0]
            _send(family, signal.SIGTERM)
            await _wait(family, patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        for _ in range(ROUNDS):
            marked, is_complete = self._search(leader)
            family = living([*family, *marked])
            if is_complete and not family:
                return
            _send(family, signal.SIGKILL)
            await asyncio.sleep(ROUND_SECONDS)
            await _wait(family, 1)

    def _search(self, leader: int) -> tuple[list[psutil.Process], bool]:
        """Returns the processes with the mark, and whether these are all. Systems other than Linux have no search.

        They are not all if one ended meanwhile, since it may have started another, or if one replaces its program,
        since its variables cannot be read then.
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
                marked += living([pid])
                is_complete = False
            elif not variables and pid > leader and pid not in self._others:
                processes = living([pid])
                is_older = any(process.create_time() < self._begun - _CLOCK_SECONDS for process in processes)
                is_complete = is_complete and is_older
                if is_older or not processes:
                    self._others.add(pid)
        return marked, is_complete


def living(processes: Iterable[psutil.Process | int]) -> list[psutil.Process]:
    """Returns the processes that have not ended. A zombie has: process 1 of a container may take seconds to reap it."""
    alive = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(process) if isinstance(process, int) else process
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


async def _wait(processes: Iterable[psutil.Process], seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while living(processes) and clock() < deadline:  # noqa: ASYNC110, only a parent is told of an end
        await asyncio.sleep(0.02)
