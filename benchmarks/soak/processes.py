"""The processes of the soak test: the API and workers that come and go, each with a log of its own."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from noetl_dagster import embedded
from noetl_dagster.settings import Settings

START_SECONDS = 60
END_SECONDS = 60
COMMAND_SECONDS = 600.0
_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b")


class Processes:
    """Starts processes of the command line in sessions of their own, so that Ctrl-C ends none of them.

    Attributes:
        started: counts of workers that were started, drained and killed.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a process of the command line."""
        number = self.counts[f"{role} started"] = self.counts[f"{role} started"] + 1
        with (self._logs / f"{role}-{number}.log").open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "noetl_dagster", *arguments],
                env={**os.environ, **embedded.environment(self.settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.setdefault(role, []).append(started)
        return started

    async def serve(self) -> str:
        """Starts the API; returns its address."""
        process, deadline = self.start("API", "serve", "--port", "0"), time.monotonic() + START_SECONDS
        log = self._logs / "API-1.log"
        while (found := re.search(r"HTTP API on (\S+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the API does not start:\n{log.read_text()}")
            await asyncio.sleep(0.1)
        return found[1]

    def start_worker(self) -> None:
        number = self.counts["worker started"] + 1
        self.start("worker", "worker", "--id", f"soak-{number}")

    def end_worker(self, rng: random.Random) -> None:
        """Drains or kills a random worker."""
        worker = rng.choice(self._running["worker"])
        self._running["worker"].remove(worker)
        self._ended.append(worker)
        drained = rng.random() < 0.5
        self.counts["worker drained" if drained else "worker killed"] += 1
        worker.send_signal(signal.SIGTERM if drained else signal.SIGKILL)

    async def run(self, role: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> tuple[int, str]:
        """Runs a command to its end, and kills it after so many seconds; returns its exit code and its log."""
        process, deadline = self.start(role, *arguments), time.monotonic() + seconds
        self._running[role].remove(process)  # it may end at any time
        self._ended.append(process)
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.1)
        return code, (self._logs / f"{role}-{self.counts[f'{role} started']}.log").read_text()

    @property
    def workers(self) -> int:
        return len(self._running.get("worker", []))

    def exited(self) -> list[str]:
        """Returns the roles of processes that have ended although they were not told to."""
        for process in self._ended:
            process.poll()
        return [role for role, found in self._running.items() for one in found if one.poll() is not None]

    def roles(self) -> dict[str, set[int]]:
        """Returns the processes of each role, with the servers and the run server."""
        running = {role: {one.pid for one in found if one.poll() is None} for role, found in self._running.items()}
        running.pop("maintain", None)
        servers = {one.name.value: {one.pid} for one in embedded.status(self.settings) if one.pid is not None}
        return {**running, **servers, "drivers": self._run_servers(), "this benchmark": {os.getpid()}}

    def _run_servers(self) -> set[int]:
        home = str(self.settings.home.resolve())
        found = set()
        for one in psutil.process_iter(["cmdline"]):
            line = one.info["cmdline"] or []
            if "noetl_dagster.launcher.server" in line and any(home in word for word in line):
                found.add(one.pid)
        return found

    def close(self) -> None:
        """Ends all processes: workers before the API, and the run server with its drivers."""
        for role in sorted(self._running, key=lambda one: one == "API"):
            self._end(self._running[role])
        self._end(self._ended)
        self._end_run_servers()

    def _end_run_servers(self) -> None:
        """Kills the run server and its drivers, which would drive unfinished executions to their end."""
        found = [psutil.Process(pid) for pid in self._run_servers()]
        found += [child for one in found for child in one.children(recursive=True)]
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(found, END_SECONDS)

    def _end(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        for one in processes:
            if one.poll() is None:
                one.send_signal(signal.SIGTERM)
        for one in processes:
            try:
                one.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.counts["processes that did not end"] += 1
                one.kill()
                one.wait()

    def messages(self) -> Counter[str]:
        """Returns warnings and errors in the logs by their text, without numbers."""
        found: Counter[str] = Counter()
        run_logs = embedded.run_server_folder(self.settings).glob("*.log")
        for path in [*self._logs.glob("*.log"), *run_logs]:
            role = path.stem.partition("-")[0] if path.parent == self._logs else "drivers"
            with path.open(errors="replace") as file:
                for line in file:
                    if _WARNING.search(line):
                        text = re.sub(r"^\S+ \S+ ", "", line.strip())
                        found[f"{role}: {re.sub(r'[0-9a-f]*[0-9][0-9a-f]*', '#', text)[:160]}"] += 1
        return found
