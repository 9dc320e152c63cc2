"""Starts detached processes, identifies them later, and ends them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import psutil

from noetl_dagster.errors import ServiceError
from noetl_dagster.private_files import private_file
from noetl_dagster.process.environment import basic_environment
from noetl_dagster.process.families import living

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """The command that starts one server.

    Attributes:
        environment: further variables, beside the basic ones of this process.
        user: the system user that runs it, which only root may set.
        folder: its working directory; default: the folder of the service.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    folder: Path | None = None


def spawn(launch: LaunchCommand, log: Path, folder: Path) -> int:
    """Starts a server in its own session, so that it outlives this process; returns its pid.

    The server passes on no access to the files that it creates.
    """
    with open(log, "ab", opener=private_file) as output:
        process = subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=launch.folder or folder,
            env={**basic_environment(), **launch.environment},
            umask=0o077,
            user=launch.user,
            group=launch.user,
            extra_groups=[] if launch.user else None,
            start_new_session=True,
        )
    return process.pid


def start_mark(pid: int) -> str | None:
    """Returns the start time of a live process in a form that clock changes do not affect; None if there is none.

    Together with the pid it identifies one process, since a recycled pid has another start time.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if psutil.LINUX:  # field 22 counts ticks since boot; the name in field 2 may hold spaces
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{process.create_time():.2f}"
    except (psutil.Error, OSError):
        return None


def end(pid: int, mark: str, first_signal: signal.Signals, patience: float) -> None:
    """Ends a process with this :func:`start_mark`, and its children; after ``patience`` seconds with SIGKILL."""
    if start_mark(pid) != mark:
        return
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    process.send_signal(first_signal)
    for one in _alive(family, patience):
        one.kill()
    _alive(family, patience=5)
    await_reaped(pid, patience=0)


def await_reaped(pid: int, patience: float = 10.0) -> None:
    """Waits until no zombie of this process is left: PostgreSQL takes the zombie of a killed server for a live one."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            process.wait(patience)


def _alive(family: Sequence[psutil.Process], patience: float) -> list[psutil.Process]:
    """Waits until these processes have ended, and returns those that have not."""
    deadline = time.monotonic() + patience
    while (alive := living(family)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def answers(port: int) -> bool:
    """Returns True if a server listens on the loopback port, even one too busy to accept."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except TimeoutError:
        return True
    except OSError:
        return False


def is_free(port: int) -> bool:
    """Returns True if a server could listen on the loopback port now."""
    try:
        socket.create_server((LOOPBACK, port)).close()  # with SO_REUSEADDR
    except OSError:
        return False
    return True


def become_free(ports: Collection[int], patience: float) -> bool:
    """Returns True if all ports become free within ``patience`` seconds (a killed server may hold one for a while)."""
    deadline = time.monotonic() + patience
    while not all(is_free(port) for port in ports):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def free_ports(count: int, taken: set[int]) -> list[int]:
    """Returns ports on which no server listens.

    They lie below the range of outgoing connections, so that no client connection can take a port while its server is
    stopped.
    """
    start = 20_000 + (os.getpid() * 37 + time.time_ns() // 1_000) % 10_000
    candidates = (*range(start, 32_000), *range(20_000, start))
    ports = list(islice((port for port in candidates if port not in taken and is_free(port)), count))
    if len(ports) < count:
        raise ServiceError(f"no {count} free ports between 20000 and 32000 on {LOOPBACK}; stop some servers")
    return ports


def tail(log: Path, lines: int = 20) -> str:
    """Returns the last lines of a log, indented for an error message."""
    last_lines = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
    return "\n".join(f"  {line}" for line in last_lines) or "  (the log is empty)"
