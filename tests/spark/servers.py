"""Spark's own servers, from the jars that PySpark brings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

HOME = Path(pyspark.__file__).parent
PATIENCE_SECONDS = 180.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(command: list[str], folder: Path, name: str, ready: Callable[[str], bool]) -> Iterator[Path]:
    """Runs one of ``bin/``'s programs until the block ends, with all that it starts; gives its log file.

    Args:
        ready: whether it serves, from what it has logged so far.
    """
    log = folder / f"{name}.log"
    environment = {**os.environ, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(HOME / "bin" / command[0]), *command[1:]],
            stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready(log.read_text()):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield log
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
