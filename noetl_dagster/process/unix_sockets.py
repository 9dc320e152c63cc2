"""Unix sockets whose path may be long, for the user of this process alone."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 100
"""A longer path is not given to the kernel, which takes 107 bytes, or 103 on macOS."""


def connect(path: str) -> socket.socket | None:
    """Returns a connection to a listening socket; None if nobody listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        return None
    return connection


def listen(path: str) -> socket.socket:
    """Returns a listening socket. It replaces one that another process has left behind."""
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
    if len(os.fsencode(path)) < MOST_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
