"""Prefect: one flow with a mapped task, on a server of its own that is up before anything is measured."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.report import RUNS, WARM_ITEMS, Task, Watch, check, task

START_SECONDS = 90.0
STOP_SECONDS = 15.0


@contextmanager
def server(told: Task) -> Iterator[None]:
    """A server on a free port of 127.0.0.1, which this process and what it starts use."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ |= {
        "PREFECT_HOME": str(told.folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_CLI_PROMPT": "false",
    }
    if told.database:
        url = told.database.replace("postgresql://", "postgresql+asyncpg://", 1)
        os.environ["PREFECT_API_DATABASE_CONNECTION_URL"] = url
    command = [str(Path(sys.prefix) / "bin" / "prefect"), "server", "start", "--host", "127.0.0.1"]
    log_file = told.folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port), "--no-ui"], stdout=log, stderr=log)
    try:
        if not _answers(process, os.environ["PREFECT_API_URL"] + "/health"):
            said = log_file.read_text(errors="replace").strip().splitlines()
            raise SystemExit(f"its server does not start: {said[-1].strip() if said else 'it says nothing'}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.3)
    return False


def main() -> None:
    told, watch = task(), Watch()
    with server(told):
        import prefect  # reads the environment when it is imported

        @prefect.task
        def double(n: int) -> int:
            return n * 2

        @prefect.flow
        def fan(items: int) -> list[int]:
            return double.map(range(items)).result()

        fan(WARM_ITEMS)
        for _ in range(RUNS):
            with watch.running():
                results = fan(told.items)
            check(results, told.items)
    kept = "PostgreSQL" if told.database else "SQLite"
    watch.report("prefect", told.items, f"a mapped task an item, on threads; its own server, {kept}")


if __name__ == "__main__":
    main()
