"""The client of the command server (:mod:`noetl_dagster.cli.command_server`), which imports next to nothing."""

import marshal
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

from noetl_dagster.process.fingerprint import fingerprint
from noetl_dagster.process.hiding import hide_from_children
from noetl_dagster.process.unix_sockets import connect

FORKED = {"run", "resume", "status", "events", "executions", "check", "cancel"}
"""Commands that the server forks. Others are rare, or run for long."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals for the process of the command."""

MOST_SERVERS = 4
"""Servers of a state folder. Programs that change a variable for each command start no more."""


def wants_server(arguments: list[str]) -> bool:
    """Returns whether the settings and the command ask for the command server.

    The command needs its standard streams and no other descriptors of this process.
    """
    wanted = os.environ.get("NOETL_WARM_COMMANDS", "").lower() in ("1", "true", "yes", "on", "t", "y")
    if not wanted or len(arguments) < 2 or arguments[1] not in FORKED:
        return False
    names_descriptor = any(folder in one for folder in ("/dev/fd/", "/proc/self/") for one in arguments)
    return None not in (sys.stdin, sys.stdout, sys.stderr) and not names_descriptor


def forward() -> int | None:
    """Lets the command server carry out the command of this process, and returns its exit code.

    If a signal ends the command, the same signal ends this process.

    Returns:
        None if no server has begun the command. A server is started for later commands.
    """
    hide_from_children()
    try:
        home = os.path.abspath(os.environ.get("NOETL_HOME", ".noetl"))
        path = os.path.join(home, "commands", f"{fingerprint(os.environ)}.sock")
    except OSError:  # the working directory has been deleted
        return None
    connection = connect(path)
    if connection is None:
        _start_server(path)
        return None
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command has begun, every signal ends this process
    with connection, connection.makefile("rb") as lines:
        try:
            _send_request(connection)
            word, process = lines.readline().split()
        except (OSError, ValueError):  # the server has just ended
            word = process = b""
        if word != b"begun":
            signal.signal(signal.SIGINT, interrupt)
            return None
        forwarding = _forward_signals(int(process))
        ended = lines.readline().split()
    for number in forwarding:
        signal.signal(number, signal.SIG_DFL)
    if not ended:
        print(f"the command server was killed: the exit code of process {int(process)} is unknown", file=sys.stderr)
        return 1
    code = int(ended[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def _send_request(connection: socket.socket) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    package = sys.modules["__main__"].__package__  # of ``python -m``, which usage messages show
    request = marshal.dumps((package, sys.argv, sys.path, umask, dict(os.environ)))
    folder = os.open(".", os.O_RDONLY)
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], [folder, 0, 1, 2])
    os.close(folder)
    connection.sendall(request)


def _forward_signals(process_group: int) -> list[signal.Signals]:
    """Forwards signals to the process of the command and its children, and returns those that are not ignored here."""

    def kill(number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(process_group, number)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:  # Ctrl-Z stops both, until the shell continues this process
            kill(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            kill(signal.SIGCONT)
        else:
            kill(number)

    forwarded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    for number in forwarded:
        signal.signal(number, on_signal)
    return forwarded


def _listens(path: str) -> bool:
    """Returns whether a server listens. One that was killed leaves its socket behind."""
    connection = connect(path)
    if connection is not None:
        connection.close()
    return connection is not None


def _start_server(path: str) -> None:
    """Starts a server that outlives this process. If several are started, one remains."""
    import subprocess
    from pathlib import Path

    from noetl_dagster.private_files import closed_folder, private_file

    try:
        folder = closed_folder(Path(path).parent)
        if sum(_listens(str(one)) for one in folder.glob("*.sock")) >= MOST_SERVERS:
            return
        log = private_file(path.removesuffix("sock") + "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        print(f"no command server can start: {error}", file=sys.stderr)
        return
    subprocess.Popen(
        [sys.executable, "-P", "-m", "noetl_dagster.cli.command_server", path],
        cwd="/",  # the server serves commands of all folders, and imports nothing from this one
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    os.close(log)
