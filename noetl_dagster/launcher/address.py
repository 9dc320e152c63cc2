"""Run servers and runs from the outside: where a server listens, how to talk to it, and which process drives a run.

There is one run server for each environment, since runs have the environment of their server. A run has a file that is
locked while its process lives. The kernel releases the lock with the process, however that ends, so the driver of a run
is known even if the run server is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import noetl_dagster
from noetl_dagster.engine.executions.runners import Runner
from noetl_dagster.errors import ServiceError
from noetl_dagster.private_files import private_folder
from noetl_dagster.process.environment import without_tokens
from noetl_dagster.process.forking import Channel, Message, connect

LAUNCHER_TAG = "noetl/run_server"
"""Run tag: the key of the run server that received the run."""

PRIORITY_TAG = "dagster/priority"
"""Run tag of Dagster's own queue: runs with larger numbers start first."""

START_SECONDS = 60.0
"""Seconds that a run server may take until it listens."""

LOG_BYTES = 20_000_000
"""A larger log is truncated."""

LOCK_TRIES = 20

_TERMINAL_VARIABLES = {
    *("_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "COLORTERM", "PS1"),
    *("SSH_TTY", "SSH_CLIENT", "SSH_CONNECTION", "PYTEST_CURRENT_TEST"),
}
_DAGSTER_PREFIX = "DAGSTER_"  # variables that Dagster sets for its child processes


def priority_of(tags: Mapping[str, str]) -> int:
    """Returns the priority of a run from its tags; 0 if there is none or it is not a number."""
    try:
        return int(tags.get(PRIORITY_TAG, "0"))
    except ValueError:
        return 0


def execute_request(
    file: str,
    execution_id: int,
    workload: dict[str, Any],
    *,
    lenient: bool,
    priority: int = 0,
    resumed: bool = False,
    epoch: int | None = None,
    runner: Runner = Runner.DAGSTER,
) -> Message:
    """Returns the request to drive an execution that is in the log.

    Args:
        resumed: it had a run before.
        epoch: that recovery opens.
    """
    return {
        "do": "execute",
        "id": str(execution_id),
        "run_id": str(uuid.uuid4()),
        "file": file,
        "lenient": lenient,
        "workload": workload,
        "priority": priority,
        "resumed": resumed,
        "epoch": epoch,
        "runner": runner.value,
    }


@dataclass(frozen=True, slots=True)
class Address:
    """A run server, running or not.

    Attributes:
        folder: of its socket, its log and the locks of its runs.
        key: a digest of its environment, working directory, interpreter and this package's files.
        environment: of its process.
        runs_at_once: processes that drive runs at the same time.
    """

    folder: Path
    key: str
    environment: Mapping[str, str]
    runs_at_once: int

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str], runs_at_once: int) -> Address:
        """Returns the address of the run server for an environment and this working directory.

        Runs get no tokens of the HTTP API.
        """
        environment = without_tokens(environment)
        key = fingerprint(environment, str(Path.cwd()), runs_at_once)
        return cls(folder, key, environment, runs_at_once)

    @property
    def log(self) -> Path:
        """The log of the server and its drivers."""
        return self.folder / f"{self.key}.log"

    def trim_log(self) -> None:
        """Truncates a log that has grown too large; its writers append."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            os.truncate(self.log, 0)

    @property
    def socket(self) -> Path:
        """The path of the server's socket."""
        return self.folder / f"{self.key}.sock"

    def connect(self) -> Channel | None:
        """Returns a connection to the server; None if it does not run."""
        connection = connect(str(self.socket))
        return Channel(connection) if connection is not None else None

    def ask(self, message: Message) -> Message | None:
        """Returns the server's answer to a message; None if it does not run."""
        channel = self.connect()
        if channel is None:
            return None
        with closing(channel), suppress(OSError):
            return channel.ask(message)
        return None

    def open(self) -> Channel:
        """Returns a connection to the server, which is started if it does not run.

        Raises:
            ServiceError: the server does not start; the message has the end of its log.
        """
        channel = self.connect()
        if channel is not None:
            return channel
        try:
            private_folder(self.folder)
            with (self.folder / f"{self.key}.starting").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                channel = self.connect()  # another process may just have started it
                return channel if channel is not None else self._start()
        except OSError as error:
            raise ServiceError(f"the run server cannot start: {error}") from error

    def _start(self) -> Channel:
        self.trim_log()
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "noetl_dagster.launcher.server"),
                    *(str(self.folder), self.key, str(self.runs_at_once)),
                ],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            channel = self.connect()
            if channel is not None:
                return channel
            time.sleep(0.01)
        tail = self.log.read_bytes()[-1000:].decode(errors="replace").strip()
        raise ServiceError(f"the run server did not start; {self.log} ends: {tail}")


def stop(folder: Path) -> None:
    """Ends all run servers of a folder and waits for their end. The next server drives the runs that wait."""
    for path in sorted(folder.glob("*.sock")):
        channel = Address(folder, path.stem, {}, 0).connect()
        if channel is None:
            continue
        with closing(channel), suppress(OSError):
            channel.send({"do": "end"})
            while channel.receive() is not None:  # its end closes the connection
                pass


def fingerprint(environment: Mapping[str, str], *facts: object) -> str:
    """Returns 16 hexadecimal digits of an environment, this interpreter, this package's files, and other facts.

    Variables of the terminal, and those that Dagster sets for its child processes, make no difference. Installing or
    removing a package does.
    """
    variables = {
        name: value
        for name, value in sorted(environment.items())
        if name not in _TERMINAL_VARIABLES and (name == "DAGSTER_HOME" or not name.startswith(_DAGSTER_PREFIX))
    }
    folders = [Path(folder) for folder in sys.path if folder.endswith("site-packages")]
    installed = [folder.stat().st_mtime_ns for folder in folders if folder.is_dir()]
    package = stamp_of(Path(noetl_dagster.__file__).parent, ".py")
    return hashlib.sha256(repr((variables, sys.executable, installed, package, facts)).encode()).hexdigest()[:16]


def stamp_of(folder: Path, *suffixes: str) -> list[tuple[str, int, int]]:
    """Returns a value that changes with the files below a folder that have one of the suffixes."""
    stamps = []
    for inside, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffixes):
                path = Path(inside, name)
                with suppress(OSError):  # a dangling link of an editor, or a file that was just removed
                    status = path.stat()
                    stamps.append((str(path), status.st_mtime_ns, status.st_size))
    return sorted(stamps)


class RunLock:
    """Marks a run as driven by this process, until :meth:`release`."""

    def __init__(self, folder: Path, run_id: str, file: IO[str]) -> None:
        self._folder, self._run_id, self._file = folder, run_id, file

    @classmethod
    def take(cls, folder: Path, run_id: str) -> RunLock | None:
        """Locks a run; None if a living process drives it already."""
        private_folder(folder)
        file = _path(folder, run_id).open("a+")
        for _ in range(LOCK_TRIES):
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
        """True if :func:`interrupt` was called for this run."""
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
