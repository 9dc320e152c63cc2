"""Which process drives a run: a file for each run, locked while its process lives.

The lock is the kernel's: it is gone with the process, however that ends. So it is known which run is driven even when
the run server is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

LOOKS = 20


class Mark:
    """Says that this process drives a run, until :meth:`release`."""

    def __init__(self, folder: Path, run_id: str, file: IO[str]) -> None:
        self._folder, self._run_id, self._file = folder, run_id, file

    @classmethod
    def take(cls, folder: Path, run_id: str) -> Mark | None:
        """Takes a run; None when a living process has it already."""
        folder.mkdir(parents=True, exist_ok=True)
        file = _path(folder, run_id).open("a+")
        for _ in range(LOOKS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)  # :func:`driver_of` has it for a moment
        else:
            file.close()
            return None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return cls(folder, run_id, file)

    @property
    def is_unwanted(self) -> bool:
        """Whether :func:`interrupt` was called for this run."""
        return _unwanted(self._folder, self._run_id).exists()

    def release(self) -> None:
        _unwanted(self._folder, self._run_id).unlink(missing_ok=True)
        _path(self._folder, self._run_id).unlink(missing_ok=True)
        self._file.close()


def driver_of(folder: Path, run_id: str) -> int | None:
    """The process that drives a run; None where none does."""
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
    """Interrupts a run; whether a process drives it. A run that the process takes afterwards is left alone."""
    pid = driver_of(folder, run_id)
    if pid is None:
        return False
    _unwanted(folder, run_id).touch()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    return True


def _path(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}.run"


def _unwanted(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}.unwanted"
