"""HTTP services for tests, in a thread of the test's own process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette


@contextmanager
def served(application: Starlette, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves on a free port until the block ends; gives the address."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://{host}:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
