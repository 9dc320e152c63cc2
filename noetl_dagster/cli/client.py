"""The client of the command server (:mod:`noetl_dagster.cli.command_server`), which imports next to nothing."""

import marshal
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

from noetl_dagster.process.fingerprint import fingerprint
from noetl_dagster.process.unix_sockets import connect

FORKED = {"run", "resume", "status", "events", "executions", "check", "cancel"}
"""Commands that the server forks. Others are rare, or run for long."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals for the process of the command."""


def wants_server(arguments: list[str]) -> bool:
    """Returns whether the settings and the command ask for the command server, which needs all standard streams."""
    wanted = os.environ.get("NOETL_WARM_COMMANDS", "").lower() in ("1", "true", "yes", "on", "t", "y")
    are_open = None not in (sys.stdin, sys.stdout, sys.stderr)
    return wanted and are_open and len(arguments) > 1 and arguments[1] in FORKED


def forward() -> int | None:
    """Lets the command server carry out the command of this process, and returns its exit code.

    If a signal ends the command, the same signal ends this process.

    Returns:
        None if no server has begun the command. A server is started for later commands.
    """
    home = os.path.abspath(os.environ.get("NOETL_HOME", ".noetl"))
    path = os.path.join(home, "commands", f"{fingerprint(os.environ)}.sock")
    connection = connect(path)
    if connection is None:
        _start_server(path)
        return None
    with connection, connection.makefile("rb") as lines:
        signals = _Signals()
        try:
            _send_request(connection)
            word, pid = lines.readline().split()
        except (OSError, ValueError):  # the server has just ended
            word = b""
        if word != b"begun":
            signals.restore()
            return None
        signals.forward(int(pid))
        ended = lines.readline().split()
    signals.restore()
    if not ended:
        print(f"the command server was killed: the exit code of process {int(pid)} is unknown", file=sys.stderr)
        return 1
    code = int(ended[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _send_request(connection: socket.socket) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    package = sys.modules["__main__"].__package__  # of ``python -m``, which usage messages show
    request = marshal.dumps((package, sys.argv, sys.path, os.getcwd(), umask, dict(os.environ)))
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(request)


class _Signals:
    """Keeps the signals of this process until that of the command is known, and then forwards them."""

    def __init__(self) -> None:
        self._process_group = 0
        self._kept: list[int] = []
        self._before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def forward(self, process_group: int) -> None:
        """Forwards what has come and what will come to a process and its children."""
        self._process_group = process_group
        for number in self._kept:
            self._on_signal(number, None)

    def restore(self) -> None:
        """Lets signals act on this process again."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._process_group:
            self._kept.append(number)
        elif number == signal.SIGTSTP:  # Ctrl-Z stops both, until the shell continues this process
            self._kill(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._kill(signal.SIGCONT)
        else:
            self._kill(number)

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process_group, number)


def _start_server(path: str) -> None:
    """Starts a server that outlives this process. If several are started, one remains."""
    import subprocess
    from pathlib import Path

    from noetl_dagster.private_files import private_file, private_folder

    try:
        private_folder(Path(path).parent)
        log = private_file(path.removesuffix("sock") + "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        print(f"no command server can start: {error}", file=sys.stderr)
        return
    subprocess.Popen(
        [sys.executable, "-m", "noetl_dagster.cli.command_server", path],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    os.close(log)
