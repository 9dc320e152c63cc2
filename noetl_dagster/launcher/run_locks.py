"""Locks that show which process drives a run: a file for each run, locked while its process lives.

The kernel releases the lock with the process, however that ends. So the driver of a run is known even when the run
server is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

TRIES = 20


class RunLock:
    """Marks a run as driven by this process, until :meth:`release`."""

    def __init__(self, folder: Path, run_id: str, file: IO[str]) -> None:
        self._folder, self._run_id, self._file = folder, run_id, file

    @classmethod
    def take(cls, folder: Path, run_id: str) -> RunLock | None:
        """Locks a run; None if a living process drives it already."""
        folder.mkdir(parents=True, exist_ok=True)
        file = _path(folder, run_id).open("a+")
        for _ in range(TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)  # :func:`driver_of` locks it for a moment
        else:
            file.close()
            return None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return cls(folder, run_id, file)

    @property
    def is_interrupted(self) -> bool:
        """Returns True if :func:`interrupt` was called for this run."""
        return _interrupt_file(self._folder, self._run_id).exists()

    def release(self) -> None:
        """Gives up the lock and removes the run's files."""
        _interrupt_file(self._folder, self._run_id).unlink(missing_ok=True)
        _path(self._folder, self._run_id).unlink(missing_ok=True)
        self._file.close()


def driver_of(folder: Path, run_id: str) -> int | None:
    """Returns the id of the process that drives a run; None if none does."""
    try:
        file = _path(folder, run_id).open("r")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read()
            return int(text) if text else None
        return None


def interrupt(folder: Path, run_id: str) -> bool:
    """Interrupts a run and reports whether a process drives it. Later runs of that process are not affected."""
    pid = driver_of(folder, run_id)
    if pid is None:
        return False
    _interrupt_file(folder, run_id).touch()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    return True


def _path(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}.run"


def _interrupt_file(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}.unwanted"
