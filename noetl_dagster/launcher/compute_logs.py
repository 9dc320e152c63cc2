"""Compute logs of runs, without the four processes that Dagster's own manager starts for each run to copy them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# private: compute logs without processes that copy them; else os.dup2
from dagster._core.execution.compute_logs import redirect_to_file

# private: the interface of compute log managers
from dagster._core.storage.compute_log_manager import CapturedLogContext

# private: compute logs without processes that copy them
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager

from noetl_dagster.private_files import private_folder

mirrored = True
"""Whether the output of a step also goes to its process's own output, as with Dagster's own manager."""

POLL_SECONDS = 0.1


class RunLogs(LocalComputeLogManager):
    """``LocalComputeLogManager`` with a thread instead of processes that copy the output, or without copies."""

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Mapping[str, Any]) -> RunLogs:
        """Makes the manager from its configuration."""
        return cls(inst_data=inst_data, **config_value)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Generator[CapturedLogContext]:
        """Redirects standard output and standard error of this process to the files of a key."""
        out, err = (Path(self.get_captured_local_path(log_key, extension)) for extension in ("out", "err"))
        private_folder(out.parent)
        with _captured(sys.stdout, out), _captured(sys.stderr, err):
            yield CapturedLogContext(log_key)
        Path(self.get_captured_local_path(log_key, "complete")).touch(mode=0o600)


@contextmanager
def _captured(stream: IO[str], path: Path) -> Iterator[None]:
    path.touch(mode=0o600)
    with _copied(stream, path), redirect_to_file(stream, str(path)):
        yield


@contextmanager
def _copied(stream: IO[str], path: Path) -> Iterator[None]:
    """Copies additions to a file to the stream's present target, until the block has ended and all is copied."""
    try:
        descriptor = stream.fileno() if mirrored else None
    except (AttributeError, OSError, ValueError):
        descriptor = None
    if descriptor is None:
        yield
        return
    target = os.dup(descriptor)
    ended = threading.Event()

    def copy() -> None:
        with path.open("rb") as file, suppress(OSError):  # the reader has gone
            file.seek(0, os.SEEK_END)
            while True:
                last = ended.wait(POLL_SECONDS)
                while more := file.read(1 << 16):
                    os.write(target, more)
                if last:
                    return

    thread = threading.Thread(target=copy, name="compute-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(target)
