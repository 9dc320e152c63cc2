"""The machine that faults hit: servers and processes of their own, and who starts them again as a user's would."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg2
import psycopg2.extensions

from noetl_dagster import embedded
from noetl_dagster.embedded import ServiceName
from noetl_dagster.embedded.processes import free_ports
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disks
from tests.chaos.network import Network
from tests.chaos.secrets import Found, search
from tests.conftest import PROJECT
from tests.forked import Forked, start
from tests.processes import end_run_servers
from tests.redelivery import redelivered_after
from tests.waiting import ended

SERVERS = (ServiceName.POSTGRES, ServiceName.NATS, ServiceName.OBJECT_STORE)
PATIENT = {"connect_timeout": 3}
RESTART_SECONDS = 0.1
DRIVER = "driver"
LOG_CHARACTERS = 12_000

TIMEOUTS: dict[str, Any] = {
    "command_heartbeat_seconds": 0.5,
    "command_heartbeat_timeout_seconds": 3.0,
    "worker_heartbeat_seconds": 0.5,
    "worker_drain_seconds": 1.0,
    "recovery_backoff_seconds": 0.1,
    "schema_apply": False,
    "default_postgres_credential": "embedded",
    "pages_url": "http://127.0.0.1:8700",
}
"""Leases and heartbeats in the time of one run."""

Process = Forked | subprocess.Popen[Any]
"""A command that was started."""


class Machine:
    """Servers, an HTTP API, an ingestor and two workers. A thread starts again what has ended.

    Attributes:
        settings: lead processes to the servers, through the proxies of ``network``.
        direct: lead the harness to them, past the proxies.
        secret: what the flows read from the keychain, and what must not be anywhere afterwards.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="noetl-chaos-"))
        self.network = Network()
        self.clocks = Clocks(self.folder)
        self.disks = Disks(self.folder / "home")
        self.direct = embedded.ensure(Settings(home=self.folder / "home", **TIMEOUTS), SERVERS)
        assert self.direct.db_url is not None
        assert self.direct.nats_url is not None
        assert self.direct.minio_endpoint is not None
        port = free_ports(1, set())[0]
        api = self.network.lead_to("api", f"http://127.0.0.1:{port}")
        self.settings = self.direct.model_copy(
            update={
                "db_url": self.network.lead_to("postgres", self.direct.db_url),
                "dagster_db_url": self.network.lead_to("dagster_db", str(self.direct.dagster_db_url)),
                "nats_url": self.network.lead_to("nats", self.direct.nats_url),
                "minio_endpoint": self.network.lead_to("object_store", self.direct.minio_endpoint),
                "server_url": api,
                "embedded": False,
            }
        )
        self.secret = f"canary-{uuid.uuid4().hex}"
        vault = json.dumps({"type": "secret", "pin": self.secret})
        self._credentials = {**embedded.demo_environment(self.direct), "NOETL_CREDENTIAL_VAULT": vault}
        self._api = f"http://127.0.0.1:{port}"
        self._commands = {
            "api": ["serve", "--port", str(port)],
            "ingestor": ["ingest"],
            "worker over nats": ["worker", "--id", "nats", "--slots", "4", "--transport", "nats"],
            "worker over http": ["worker", "--id", "http", "--slots", "4", "--transport", "http"],
        }
        self._processes: dict[str, Forked] = {}
        self._lock = threading.Lock()
        self._stopped: set[int] = set()
        self._stopping = threading.Lock()
        self._ending = threading.Event()
        self._watching = threading.Thread(target=self._supervise, daemon=True)

    def open(self) -> None:
        done = self.run("provision")
        assert done == 0, self.output("provision")
        asyncio.run(redelivered_after(self.direct, 2.0))
        for name in self._commands:
            self._start(name)
        self._watching.start()

    def close(self) -> None:
        self._ending.set()
        if self._watching.ident is not None:
            self._watching.join()
        for process in self._processes.values():
            self.end(process)
        self.network.close()
        end_run_servers(embedded.run_server_folder(self.settings))
        embedded.down(self.direct)
        self.disks.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- processes ---------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        names = ("PATH", "HOME", "JAVA_HOME", "LANG")
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        return {**inherited, "PYTHONFAULTHANDLER": "1", **embedded.environment(self.settings), **self._credentials}

    def command(self, name: str, *arguments: str, has_clock: bool = True, **more: str) -> Process:
        """Starts ``noetl-dagster``; what it writes is added to the output of ``name``.

        Args:
            has_clock: False for a process that starts a JVM. PySpark forks it from a thread, and the library that moves
                clocks may hold a lock then, for which the fork waits for ever.
        """
        output = self._output(name)
        if not has_clock:
            arguments = (sys.executable, "-m", "noetl_dagster", *arguments)
            environment = self.environment | {"PYTHONPATH": str(PROJECT)} | more
            with output.open("ab") as file:
                return start(list(arguments), env=environment, cwd=self.folder, stdout=file, forks=False)
        clock = self.clocks.environment(name if name in self._commands else DRIVER)
        environment = self.environment | clock | more
        return Forked("noetl-dagster", *arguments, environment=environment, folder=self.folder, output=output)

    def run(self, *arguments: str) -> int:
        return self.command(arguments[0], *arguments).wait(120)

    def output(self, name: str, last: int = LOG_CHARACTERS) -> str:
        path = self._output(name)
        return path.read_text(errors="replace")[-last:] if path.exists() else ""

    def said(self) -> str:
        """The end of every log."""
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}" for path in logs[-8:])

    def _output(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"

    def process(self, name: str) -> int | None:
        """The process id of a service or server; None while it is down."""
        if name in self._commands:
            running = self._processes.get(name)
            return None if running is None or running.poll() is not None else running.pid
        pid = read_state(self.direct.home).services[ServiceName(name)].pid
        return None if pid is None or ended(pid) else pid

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        """Stops a process and its children, without a word to it."""
        with self._stopping:
            for one in _family(pid):
                with suppress(psutil.NoSuchProcess):
                    one.suspend()
                    self._stopped.add(one.pid)

    def wake(self) -> None:
        """Continues everything that was stopped, also if another fault stops more just now."""
        with self._stopping:
            while self._stopped:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(self._stopped.pop()).resume()

    def heal(self) -> None:
        """Ends every fault."""
        self.wake()
        self.network.heal()
        self.clocks.set_right()
        self.disks.free()
        self.start_servers()

    def start_servers(self) -> None:
        """Starts the servers that do not run, as a supervisor: again, if one does not begin to serve."""
        settings = Settings(home=self.direct.home, **TIMEOUTS)
        with suppress(ServiceError):
            embedded.ensure(settings, SERVERS)
            return
        for name in SERVERS:
            if not read_state(settings.home).services[name].ready and (pid := self.process(name)) is not None:
                self.kill(pid)
        embedded.ensure(settings, SERVERS)

    def end(self, process: Process) -> None:
        """Ends a process with all of its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def exposed(self, execution_ids: Sequence[int]) -> list[Found]:
        """Where the secret is, in all that the machine has stored, written and shows of some executions."""

        async def found() -> list[Found]:
            async with httpx.AsyncClient(base_url=self._api, trust_env=False) as pages:
                return await search(self.direct, [self.secret], [self.folder], pages=pages, execution_ids=execution_ids)

        return asyncio.run(found())

    def _start(self, name: str) -> None:
        with self._output(name).open("a") as log:
            log.write(f"-- started at {time.strftime('%H:%M:%S')}\n")
        self._processes[name] = self.command(name, *self._commands[name])

    def _supervise(self) -> None:
        """Starts services again, as systemd or Kubernetes would, after a moment."""
        due: dict[str, float] = {}
        while not self._ending.wait(0.05):
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                if name not in due:
                    due[name] = time.monotonic() + RESTART_SECONDS
                elif time.monotonic() > due[name]:
                    del due[name]
                    self.end(process)  # what it left behind
                    self._start(name)

    # -- the database ------------------------------------------------------------------------------

    @contextmanager
    def database(self) -> Iterator[psycopg2.extensions.cursor]:
        """A cursor on the log's database, past the proxies; each statement is a transaction."""
        assert self.direct.db_url is not None
        connection = psycopg2.connect(self.direct.db_url, **PATIENT)
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.database() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
