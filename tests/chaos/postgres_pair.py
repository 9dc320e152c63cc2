"""Two PostgreSQL servers, a primary and its hot standby, of which either may be killed and come back."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2

from noetl_dagster.embedded import postgres
from noetl_dagster.embedded.postgres import SUPERUSER, administering
from noetl_dagster.embedded.processes import LOOPBACK, free_ports
from noetl_dagster.process.environment import basic_environment
from tests.waiting import until_now

STANDBY = "standby"

_CONFIG = """\
listen_addresses = '{host}'
port = {port}
unix_socket_directories = ''
max_connections = 200
shared_buffers = 64MB
fsync = off
jit = off
autovacuum_naptime = 15s
cluster_name = '{standby}'
wal_receiver_status_interval = 1s
wal_retrieve_retry_interval = 100ms
"""

_STATES = "SELECT sync_state FROM pg_stat_replication"
_SENDER = "SELECT pid FROM pg_stat_replication"


@dataclass(slots=True)
class Server:
    """One of the two servers."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"


class PostgresPair:
    """A primary and a hot standby.

    Attributes:
        synchronous: a commit waits until the standby has it.
    """

    def __init__(self, folder: Path, *, synchronous: bool) -> None:
        self.synchronous = synchronous
        self._password = secrets.token_hex(12)
        self._user = postgres._system_user()
        found = postgres._programs()
        self._programs = found if self._user is None else postgres._reachable(found)
        ports = free_ports(2, set())
        self.primary, self.standby = (Server(folder / name, port) for name, port in zip("ab", ports, strict=True))
        self._ports = ports

    def url(self, database: str = "noetl") -> str:
        """Returns the address of whichever server is the primary."""
        hosts = ",".join(f"{LOOPBACK}:{port}" for port in self._ports)
        return f"postgresql://{SUPERUSER}:{self._password}@{hosts}/{database}"

    def url_of(self, server: Server, database: str = "postgres") -> str:
        """Returns the address of one server."""
        return f"postgresql://{SUPERUSER}:{self._password}@{LOOPBACK}:{server.port}/{database}"

    def start(self, *databases: str) -> None:
        """Makes the servers and the databases."""
        self.primary.folder.mkdir()
        postgres._initialise(self.primary.data, self._programs, self._user, self._password)
        self._launch(self.primary)
        with administering(self.url_of(self.primary)) as cursor:
            for database in databases:
                cursor.execute(f'CREATE DATABASE "{database}"')
        self.add_standby()

    def add_standby(self) -> None:
        """Copies the primary into the other server, and starts it as its standby."""
        standby = self.standby
        shutil.rmtree(standby.folder, ignore_errors=True)
        standby.folder.mkdir()
        if self._user is not None:
            os.chown(standby.folder, self._user.pw_uid, self._user.pw_gid)
        source = f"host={LOOPBACK} port={self.primary.port} user={SUPERUSER} password={self._password}"
        copying = ["-d", source, "-D", "data", "-R", "-X", "stream", "-c", "fast", "--no-sync"]
        subprocess.run([str(self._programs / "pg_basebackup"), *copying], check=True, **self._options(standby.folder))
        self._launch(standby)
        if self.synchronous:
            self._on_primary(f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'", "SELECT pg_reload_conf()")
        wanted = "sync" if self.synchronous else "async"
        until_now(lambda: self._on_primary(_STATES) == [(wanted,)], f"a standby that is {wanted}")

    def kill_primary(self) -> None:
        """Kills the primary and all of its processes."""
        _kill(self.primary)

    def promote(self) -> None:
        """Makes the standby the primary."""
        with administering(self.url_of(self.standby)) as cursor:
            cursor.execute("SELECT pg_promote()")
        self.primary, self.standby = self.standby, self.primary

    def fail_over(self) -> None:
        """Kills the primary, and makes the standby the primary."""
        self.kill_primary()
        self.promote()

    def heal(self) -> None:
        """Completes a failover: promotes the standby if the primary is dead, and adds a standby if there is none."""
        if self.primary.process is None:
            self.promote()
        if self.standby.process is None:
            self.add_standby()

    @contextmanager
    def not_sending(self) -> Iterator[None]:
        """Stops the stream to the standby: what is committed meanwhile is lost with the primary."""
        [(sender,)] = self._on_primary(_SENDER)
        os.kill(sender, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(sender, signal.SIGCONT)

    def stop(self) -> None:
        """Ends both servers."""
        for server in (self.primary, self.standby):
            _kill(server)

    def _on_primary(self, *statements: str) -> list[tuple[Any, ...]]:
        with administering(self.url_of(self.primary)) as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def _launch(self, server: Server) -> None:
        config = _CONFIG.format(host=LOOPBACK, port=server.port, standby=STANDBY)
        (server.data / "noetl.conf").write_text(config)
        argv = [str(self._programs / "postgres"), "-D", postgres._place(server.data, self._user)]
        with (server.folder / "log").open("ab") as log:
            options = {**self._options(server.data), "stdout": log, "stderr": log}
            server.process = subprocess.Popen(argv, **options)
        until_now(lambda: self._answers(server), "PostgreSQL to answer")

    def _answers(self, server: Server) -> bool:
        assert server.process is not None
        assert server.process.poll() is None, (server.folder / "log").read_text()
        with suppress(psycopg2.OperationalError), administering(self.url_of(server)):
            return True
        return False

    def _options(self, folder: Path) -> dict[str, Any]:
        user = self._user and self._user.pw_name
        return {
            **{"cwd": folder, "env": basic_environment(), "umask": 0o077, "start_new_session": True},
            **{"user": user, "group": user, "extra_groups": [] if user else None},
            "stdin": subprocess.DEVNULL,
        }


def _kill(server: Server) -> None:
    if server.process is None:
        return
    with suppress(psutil.NoSuchProcess):
        postmaster = psutil.Process(server.process.pid)
        postmaster.suspend()  # it starts no further processes
        for one in (*postmaster.children(recursive=True), postmaster):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    server.process.wait()
    server.process = None


@contextmanager
def postgres_pair(*databases: str, synchronous: bool = True) -> Iterator[PostgresPair]:
    """Gives a pair with these databases until the block ends."""
    with tempfile.TemporaryDirectory(prefix="noetl-pair-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        pair = PostgresPair(folder, synchronous=synchronous)
        try:
            pair.start(*databases)
            yield pair
        finally:
            pair.stop()
