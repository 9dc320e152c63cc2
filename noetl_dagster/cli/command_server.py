"""The command server: with ``NOETL_WARM_COMMANDS``, commands are forked from a process that has imported everything.

The client (:mod:`noetl_dagster.cli.client`) hands over its arguments, its environment and its standard streams, and
waits. The server forks a process that becomes the command: its output, its signals and its exit code are those of the
command without a server. If the client is killed, so is the command.

There is one server for each state folder, environment and version of this package's files. It has one thread and no
connections but those to clients. It ends after a while without commands, and when the folder of its socket is removed.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import marshal
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO

from noetl_dagster.process.unix_sockets import listen

IDLE_SECONDS = 600.0
"""Seconds without a command after which a server ends."""

IMPORTED = (
    "encodings.idna",
    "encodings.utf_8_sig",
    "noetl_dagster.cli.app",
    "noetl_dagster.cli.commands.check",
    "noetl_dagster.cli.commands.executions",
    "noetl_dagster.cli.commands.run",
    "noetl_dagster.storage.tiers.inline",
)
"""The commands, and what they import when they are called."""


class CommandServer:
    """Serves until it has had no command for a while, or until the file that it has locked is removed.

    Args:
        path: of its socket.
        lock: the open file that it has locked.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self._path = path
        self._lock = lock
        self._listener = listen(str(path))
        self._commands: dict[int, socket.socket] = {}
        self._used = time.monotonic()

    def serve(self) -> socket.socket | None:
        """Forks a process for each request.

        Returns:
            None at the end of the server. In a forked process, the connection to its client.
        """
        woken, waking = socket.socketpair()
        waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking.fileno())
        selector = selectors.DefaultSelector()
        for readable in (self._listener, woken):
            selector.register(readable, selectors.EVENT_READ)
        while self._commands or (is_locked(self._lock) and time.monotonic() < self._used + IDLE_SECONDS):
            for key, _ in selector.select(timeout=1.0):
                if key.fileobj is woken:
                    woken.recv(1024)
                    self._report_ended()
                    continue
                client, _ = self._listener.accept()
                self._used = time.monotonic()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for inherited in (self._listener, woken, waking, *self._commands.values()):
                        inherited.close()
                    return client
                self._commands[pid] = client
        if is_locked(self._lock):
            self._path.unlink()
            Path(self._lock.name).unlink()
        return None

    def _report_ended(self) -> None:
        """Tells clients how their commands have ended."""
        for pid, client in list(self._commands.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._commands.pop(pid), suppress(OSError):
                    client.sendall(b"ended %d\n" % os.waitstatus_to_exitcode(status))


def is_locked(file: IO[str]) -> bool:
    """Returns whether an open file still has its name; else another server may have taken the place of this one."""
    try:
        return os.path.samestat(Path(file.name).stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def become_command(client: socket.socket) -> None:
    """Gives this process the streams, the arguments and the environment of its client."""
    from noetl_dagster.cli.console import fit_terminal
    from noetl_dagster.settings import get_settings

    os.setsid()  # signals reach the processes that the command starts, too
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    size, given, _, _ = socket.recv_fds(client, 8, 4)
    if not size:  # the client has ended
        sys.exit(1)
    folder, *descriptors = given
    with client.makefile("rb") as request:
        package, arguments, path, umask, environment = marshal.loads(request.read(int.from_bytes(size, "little")))
    os.fchdir(folder)
    os.close(folder)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(descriptors[number], number)
        os.close(descriptors[number])
        before = getattr(sys, name)
        buffering = 1 if name == "stderr" or before.write_through else -1  # the latter with PYTHONUNBUFFERED
        fresh = open(number, mode, buffering, encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, fresh)
    sys.modules["__main__"].__package__ = package
    sys.argv, sys.path[:] = arguments, path
    os.environ.clear()
    os.environ.update(environment)
    os.umask(umask)
    get_settings.cache_clear()
    fit_terminal()
    threading.Thread(target=_end_with, args=(client,), name="client", daemon=True).start()
    client.sendall(b"begun %d\n" % os.getpid())


def _end_with(client: socket.socket) -> None:
    """Ends this process and its children when its client has gone, which has then been killed."""
    with suppress(OSError):
        client.recv(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """``python -m noetl_dagster.cli.command_server SOCKET``, started by a client."""
    path = Path(sys.argv[1])
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another server starts or serves
        from noetl_dagster.process.hiding import hide_from_children

        hide_from_children()
        for module in IMPORTED:
            import_module(module)
        gc.collect()
        gc.freeze()  # no collection in a command writes to, and so copies, memory that it shares with this process
        if not is_locked(lock):  # the services were stopped meanwhile
            return
        client = CommandServer(path, lock).serve()
    if client is not None:
        become_command(client)
        _carry_out()


_has_predecessors = bool(getattr(atexit, "_ncallbacks", lambda: 1)())
_code: int | None = None


def _carry_out() -> None:
    """Calls the command line. Its end skips the clean-up of modules, which would copy most of the server's memory.

    Not if Dagster was imported, since playbook code may then have left files open, and not if functions of ``atexit``
    were registered before :func:`_end`, which would be skipped, too.
    """
    global _code
    from noetl_dagster.cli.app import main as command

    try:
        command()
    except SystemExit as ended:
        if isinstance(ended.code, int) and "dagster" not in sys.modules and not _has_predecessors:
            _code = ended.code & 0xFF
        raise


@atexit.register  # before those of other modules are registered, so that it is called after them
def _end() -> None:
    if _code is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the interpreter reports it
    os._exit(_code)


if __name__ == "__main__":
    main()
