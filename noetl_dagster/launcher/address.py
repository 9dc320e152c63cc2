"""Run servers from the outside: where one listens, how to talk to it, and the run tags that name it.

There is one run server for each environment, since runs have the environment of their server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from noetl_dagster.errors import ServiceError

Message = dict[str, Any]

READ_BYTES = 1 << 16


class Channel:
    """One end of a connection. Reading never blocks where the socket does not."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unread = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, whole.

        Raises:
            OSError: the other side is gone.
        """
        self.sock.sendall(orjson.dumps(message) + b"\n")

    def arrived(self) -> list[Message] | None:
        """Messages that are here after one read from the socket; None when the other side is gone."""
        try:
            more = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not more:
            return None
        *lines, self._unread = (self._unread + more).split(b"\n")
        return [orjson.loads(line) for line in lines]

    def receive(self) -> Message | None:
        """The next message, waited for; None when the other side is gone. For one message at a time."""
        while True:
            found = self.arrived()
            if found is None or found:
                return found[0] if found else None

    def close(self) -> None:
        self.sock.close()


LAUNCHER_TAG = "noetl/run_server"
"""Run tag that names the run server which was given the run."""

PRIORITY_TAG = "dagster/priority"
"""Run tag of Dagster's own queue: the run with the larger number goes first."""


def priority_of(tags: Mapping[str, str]) -> int:
    """Priority of a run by its tags; 0 where there is none, or none that is a number."""
    try:
        return int(tags.get(PRIORITY_TAG, "0"))
    except ValueError:
        return 0


START_SECONDS = 60.0
"""How long a run server may take until it listens."""

LOG_BYTES = 20_000_000
"""A log that has grown beyond is begun anew."""

_OF_THE_TERMINAL = {
    *("_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "COLORTERM", "PS1"),
    *("SSH_TTY", "SSH_CLIENT", "SSH_CONNECTION", "PYTEST_CURRENT_TEST"),
}
_OF_DAGSTER = "DAGSTER_"  # its processes tell their children about themselves


@dataclass(frozen=True, slots=True)
class Address:
    """A run server, running or not.

    Attributes:
        folder: where its socket, its log and the marks of its runs are.
        key: names what it is made of: environment, working directory, interpreter and this package's files.
        environment: of its process.
        runs_at_once: processes that drive runs at the same time.
    """

    folder: Path
    key: str
    environment: Mapping[str, str]
    runs_at_once: int

    @classmethod
    def of(cls, folder: Path, environment: Mapping[str, str], runs_at_once: int) -> Address:
        known = {
            name: value
            for name, value in sorted(environment.items())
            if name not in _OF_THE_TERMINAL and (name == "DAGSTER_HOME" or not name.startswith(_OF_DAGSTER))
        }
        facts = (known, str(Path.cwd()), sys.executable, runs_at_once, _newest_file())
        return cls(
            folder, hashlib.sha256(repr(facts).encode()).hexdigest()[:16], dict(environment), runs_at_once
        )

    @property
    def log(self) -> Path:
        return self.folder / f"{self.key}.log"

    def trim_log(self) -> None:
        """Begins a log anew that has grown too large; who writes to it appends."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            os.truncate(self.log, 0)

    def connect(self) -> Channel | None:
        """A connection to the server; None where none runs."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            with self.reached() as path:
                sock.connect(path)
        except OSError:
            sock.close()
            return None
        return Channel(sock)

    def open(self) -> Channel:
        """A connection to the server, which is started when it does not run.

        Raises:
            ServiceError: it does not start; the message holds the end of its log.
        """
        channel = self.connect()
        if channel is not None:
            return channel
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / f"{self.key}.starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            channel = self.connect()  # somebody else may just have started it
            return channel if channel is not None else self._start()

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

    def listen(self) -> socket.socket:
        """The server's own end, for its user alone. Who calls this holds the lock of :meth:`open`."""
        listener = socket.socket(socket.AF_UNIX)
        (self.folder / f"{self.key}.sock").unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            with self.reached() as path:
                listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(1024)
        return listener

    @contextmanager
    def reached(self) -> Iterator[str]:
        """A path of the socket that is short enough for one, however deep the folder lies."""
        path = str(self.folder / f"{self.key}.sock")
        if len(path) < 100:
            yield path
            return
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{descriptor}/{self.key}.sock"
        finally:
            os.close(descriptor)


def stop(folder: Path) -> None:
    """Ends all run servers of a folder; what waits there is driven by the next. Returns when they have ended."""
    for path in sorted(folder.glob("*.sock")):
        channel = Address(folder, path.stem, {}, 0).connect()
        if channel is None:
            continue
        with suppress(OSError):
            channel.send({"do": "end"})
            while channel.receive() is not None:  # its end closes the connection
                pass
        channel.close()


def _newest_file() -> int:
    """When a module of this package was last changed, in nanoseconds: its runs have what it had imported."""
    package = Path(__file__).parents[1]
    newest = 0
    for path in package.rglob("*.py"):
        with suppress(OSError):  # an editor's lock that leads nowhere, a file that has just gone
            newest = max(newest, path.stat().st_mtime_ns)
    return newest
