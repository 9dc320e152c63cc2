"""A MySQL server for tests: MariaDB if it is installed, else MySQL's protocol over SQLite (mysql-mimic).

The stand-in has the protocol, transactions and the errors of constraints. Types, locks and dialect are SQLite's.
``TEST_MYSQL=mimic`` selects it where MariaDB is installed, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import sqlglot
from mysql_mimic import IdentityProvider, MysqlServer, NativePasswordAuthPlugin, User, connection
from mysql_mimic.constants import KillKind
from mysql_mimic.errors import ErrorCode, MysqlError
from mysql_mimic.session import BaseSession
from mysql_mimic.variables import GlobalVariables, SessionVariables

SYSTEM = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"
MARIADB = None if os.environ.get("TEST_MYSQL") == "mimic" else shutil.which("mariadbd", path=SYSTEM)
START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the server dies with a pytest that is killed
logging.getLogger("mysql_mimic").setLevel(logging.CRITICAL)
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Server:
    port: int
    is_real: bool

    def url(self, database: str = "") -> str:
        return f"mysql://root:secret-of-root@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str | None = None) -> Any:
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", password="secret-of-root", database=database, autocommit=True
        )

    def execute(self, database: str, *statements: str) -> list[Any]:
        """The rows of the last statement."""
        with self.connect(database) as opened, opened.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def new_database(self) -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        if self.is_real:
            with self.connect() as opened, opened.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {name}")
        return name


@contextmanager
def mysql_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="noetl-mysql-") as folder:
        if MARIADB is None:
            yield from _mimic(Path(folder))
        else:
            yield from _mariadb(Path(folder))


def _mariadb(folder: Path) -> Iterator[Server]:
    data = folder / "data"
    own = ["--no-defaults", f"--datadir={data}"]
    install = shutil.which("mariadb-install-db")
    assert MARIADB is not None
    assert install is not None
    user = ["--user=root"] if os.geteuid() == 0 else []
    libc = ctypes.CDLL(None)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    method = "--auth-root-authentication-method=normal"
    subprocess.run([install, *own, *user, method, "--skip-test-db"], check=True, **quiet)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    start = folder / "start.sql"
    start.write_text("ALTER USER root@localhost IDENTIFIED BY 'secret-of-root';\n")
    process = subprocess.Popen(
        [
            *(MARIADB, *own, *user, "--bind-address=127.0.0.1", f"--port={port}", f"--init-file={start}"),
            *(f"--socket={folder / 'socket'}", f"--pid-file={folder / 'pid'}"),
            *("--skip-name-resolve=0", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M"),
        ],
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        **quiet,
    )
    try:
        server = Server(port, True)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                server.connect().close()
                break
            except pymysql.err.OperationalError:
                assert process.poll() is None, "mariadbd has ended"
                assert time.monotonic() < until, "mariadbd does not start"
                time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _mimic(folder: Path) -> Iterator[Server]:
    started: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        server = MysqlServer(lambda: _SqliteSession(folder), identity_provider=_Users(), host="127.0.0.1", port=0)
        await server.start_server()
        stop = asyncio.Event()
        started.extend((asyncio.get_running_loop(), stop, server._server.sockets[0].getsockname()[1]))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait(START_SECONDS)
    loop, stop, port = started
    yield Server(port, False)
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


class _Users(IdentityProvider):
    async def get_user(self, username: str) -> User | None:
        own = NativePasswordAuthPlugin.create_auth_string("secret-of-root")
        return User(username, own, NativePasswordAuthPlugin.name) if username == "root" else None


_UPSERT = re.compile(r"ON DUPLICATE KEY UPDATE (.*)$", re.DOTALL)


class _SqliteSession(BaseSession):
    """One connection: its statements run in a file of SQLite, which all connections to that database share."""

    def __init__(self, folder: Path) -> None:
        self.variables = SessionVariables(GlobalVariables())
        self.username = self.database = None
        self._folder = folder
        self._opened: sqlite3.Connection | None = None
        self._affected = 0
        self._own: connection.Connection | None = None

    async def _kill(self, number: int) -> None:
        assert self._own is not None
        await self._own.control.kill(number, KillKind.CONNECTION)

    async def init(self, own: connection.Connection) -> None:
        self._own = own
        make_ok = own.ok

        def ok(**fields: Any) -> bytes:
            affected, self._affected = self._affected, 0
            return make_ok(**{**fields, "affected_rows": fields.get("affected_rows") or affected})

        own.ok = ok

    async def use(self, database: str) -> None:
        self.database = database

    async def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    async def handle_query(self, sql: str, attrs: dict[str, str]) -> Any:
        word = sql.split(None, 1)[0].upper()
        if word == "KILL":
            await self._kill(int(sql.split()[-1]))
            return None
        if word == "SET":
            return None
        if "SLEEP(" in sql.upper():
            await asyncio.sleep(3600)
        if "information_schema" in sql.lower():
            return [("InnoDB",)], ["engine"]
        try:
            rows, columns = await asyncio.to_thread(self._execute, sql, word)
        except sqlite3.IntegrityError as error:
            code = 1062 if "UNIQUE" in str(error) else 1048
            raise MysqlError(str(error), _Code(code)) from None
        except (sqlite3.Error, sqlglot.ParseError) as error:
            raise MysqlError(str(error), ErrorCode.PARSE_ERROR) from None
        return (rows, columns) if columns else None

    def _execute(self, sql: str, word: str) -> tuple[list[Any], list[str]]:
        if self._opened is None:
            path = self._folder / f"{self.database}.sqlite"
            self._opened = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        if word == "START":
            sql = "BEGIN"
        elif word in ("COMMIT", "ROLLBACK", "SAVEPOINT"):
            if not self._opened.in_transaction:
                return [], []
        elif sql.startswith("INSERT IGNORE"):
            sql = sql.replace("IGNORE", "OR IGNORE", 1)
        else:
            sql = _UPSERT.sub("", sql.replace("INSERT INTO", "REPLACE INTO", 1)) if _UPSERT.search(sql) else sql
            [sql] = sqlglot.transpile(sql.replace(" FOR UPDATE SKIP LOCKED", ""), read="mysql", write="sqlite")
        cursor = self._opened.execute(sql)
        columns = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchall()
        self._affected = max(0, cursor.rowcount)
        return rows, columns


class _Code(int):
    """A number of an error that mysql-mimic has no name for."""

    def __str__(self) -> str:
        return str(int(self))


with suppress(AttributeError):
    _Code.value = property(int)  # type: ignore[attr-defined]
