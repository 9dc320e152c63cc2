"""HTTP services for tests, in a thread of the test's own process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette


def bound(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Returns a socket for a server of asyncio, on any free port by default.

    It names its protocol. Otherwise asyncio leaves Nagle's algorithm on, and each answer waits 40 ms for an acknowledgement.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


@contextmanager
def served(application: Starlette, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves on a free port until the block ends; gives the address."""
    with bound(host=host) as sock:
        server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://{host}:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
