"""Processes that are forked from a preloaded one, and JSON messages between processes over Unix sockets.

A preloaded process has imported everything, and has one thread and no connections but sockets, so that the processes
that it forks inherit nothing that a fork breaks. The run server forks the drivers of runs. A :class:`ForkServer` forks
the helper processes of a driver.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import orjson

from noetl_dagster.process.environment import own_environment

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""A message between two processes; ``do`` is its kind if it asks for something."""

READ_BYTES = 1 << 16

MOST_BYTES = 1 << 30
"""Length of a message, which may hold an execution's workload, at most."""

PATH_BYTES = 100
"""A longer path is not given to the kernel, which takes 107 bytes, or 103 on macOS."""


class Channel:
    """One end of a connection: JSON objects, one on each line, over a Unix socket, without an event loop.

    Reading blocks only if the socket does.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unread = b""

    def fileno(self) -> int:
        """Returns the descriptor of the socket, for selectors."""
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Sends a whole message; raises OSError if the other side has closed the connection."""
        self.sock.sendall(_line(message))

    def arrived(self) -> list[Message] | None:
        """Reads the socket once and returns the complete messages; None if the other side has closed it."""
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
        """Waits for the next message, one at a time; None if the other side has closed the connection."""
        while (messages := self.arrived()) == []:
            pass
        return messages[0] if messages else None

    def ask(self, message: Message) -> Message | None:
        """Sends a message and returns the answer; None if the other side closes the connection meanwhile."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()


class AsyncChannel:
    """A :class:`Channel` on an event loop. Sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> Self:
        """Wraps a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=connected, limit=MOST_BYTES))

    def send(self, message: Message) -> None:
        """Sends, or does nothing when the other end is gone: the receiver finds that out."""
        if not self._writer.is_closing():
            self._writer.write(_line(message))

    async def receive(self) -> Message | None:
        """Returns the next message, or None when the other end is gone."""
        try:
            line = await self._reader.readuntil()
        except (asyncio.IncompleteReadError, OSError):
            return None
        message: Message = orjson.loads(line)
        return message

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()


def _line(message: Message) -> bytes:
    return orjson.dumps(message) + b"\n"


class Closable(Protocol):
    """A socket, a channel or a selector."""

    def close(self) -> None:
        """Releases its descriptors."""


def freeze_memory() -> None:
    """Lets forked processes share the memory of this process: no collection there writes to it, and so copies it."""
    gc.collect()
    gc.freeze()


def fork(become: Callable[[], None], inherited: Iterable[Closable]) -> int:
    """Forks a process that calls a function and then ends; returns its id.

    Args:
        inherited: is closed in the forked process. While a copy of a socket is open, the other end does not notice
            that this process has ended.
    """
    pid = os.fork()
    if not pid:
        _become(become, inherited)
    return pid


def _become(become: Callable[[], None], inherited: Iterable[Closable]) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for closable in inherited:
            closable.close()
        become()
        code = 0
    except BaseException:
        logger.exception("a forked process ends")
    finally:
        logging.shutdown()
        os._exit(code)


class ForkServer:
    """A preloaded process of this process that forks others on request.

    It and what it forks end with this process: they read from a pipe that only this process writes to.

    Args:
        module: calls :func:`serve_forks` when it is started with ``python -m``.
        options: are the first message to it. They may contain secrets, since no other process sees them.
    """

    def __init__(self, module: str, options: Message) -> None:
        self._control, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.PIPE,
                env=own_environment(),
            )
        os.close(lifeline)
        assert self._process.stdin is not None
        with self._process.stdin as start:
            start.write(orjson.dumps(options))

    @property
    def is_alive(self) -> bool:
        """Reports that the process runs."""
        return self._process.poll() is None

    def fork(self) -> socket.socket:
        """Returns the socket of a new process, which reports over it when it is ready."""
        own, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        own.setblocking(False)
        return own

    def close(self) -> None:
        """Ends the preloaded process, and with it every process that it has forked and that still lives."""
        self._control.close()
        os.close(self._lifeline)
        threading.Thread(target=self._process.wait, daemon=True).start()  # so that no zombie stays


def serve_forks(prepare: Callable[[Message], Callable[[socket.socket], None]]) -> None:
    """Runs the preloaded process of a :class:`ForkServer`.

    Args:
        prepare: gets the options of the fork server. Returns the function that a forked process calls with its socket.
    """
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks for forks decides what an interrupt ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forked processes that have ended
    options = sys.stdin.buffer.read()
    if not options:
        return
    work = prepare(orjson.loads(options))
    freeze_memory()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        with socket.socket(fileno=descriptors[0]) as connected:

            def become(connected: socket.socket = connected) -> None:
                threading.Thread(target=_end_with, args=(lifeline,), name="noetl-lifeline", daemon=True).start()
                work(connected)

            fork(become, [control])


def _end_with(lifeline: int) -> None:
    """Ends this process with the one at the other end, since another process may resume the execution at once."""
    os.read(lifeline, 1)
    os._exit(1)


def connect(path: str) -> socket.socket | None:
    """Returns a connection to a listening socket, whose path may be long; None if nothing listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        return None
    return connection


def listen(path: str) -> socket.socket:
    """Returns a listening socket for this user. It replaces one that another process has left behind."""
    listener = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with _short(path) as short:
            listener.bind(short)
    finally:
        os.umask(before)
    listener.listen(1024)
    return listener


@contextmanager
def _short(path: str) -> Iterator[str]:
    if len(os.fsencode(path)) < PATH_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
