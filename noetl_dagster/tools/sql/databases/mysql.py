"""MySQL and MariaDB, through PyMySQL."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import FIELD_TYPE
from pymysql.converters import conversions
from pymysql.cursors import SSCursor

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError
from noetl_dagster.storage.exact_json import Numbers, loads_exact
from noetl_dagster.tools.access.credential_types import Credential
from noetl_dagster.tools.rows.columns import Convert, integer, row_value
from noetl_dagster.tools.sql.databases.base import Database, Failure

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_SECONDS = 10.0
PORT = 3306

SLOW_READER = "SET SESSION net_write_timeout = 3600"
"""The server waits while a target or a stream of chunks has no room; its default is a minute."""
UTC_AND_STRICT = """
SET SESSION time_zone = '+00:00', sql_mode = CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')
"""
SELECT_ENGINE = """
SELECT engine FROM information_schema.tables
WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s AND engine IS NOT NULL
"""
TRANSACTIONAL = frozenset({"innodb", "rocksdb", "tokudb", "ndbcluster", "ndb", "xtradb", "spider"})

_KINDS: Mapping[ErrorKind, frozenset[int]] = {
    "auth": frozenset({1044, 1045, 1142, 1143, 1227, 1370, 1698, 3118, 3955}),
    "db_constraint": frozenset(
        {1022, 1048, 1062, 1169, 1216, 1217, 1264, 1364, 1406, 1451, 1452, 1557, 1586, 1690, 1761, 1762, 3819, 4025}
    ),
    "db_deadlock": frozenset({1213, 1614}),
    "db_timeout": frozenset({1205, 1317, 1907, 1969, 3024, 3572}),
    "db_connection": frozenset({1040, 1042, 1043, 1049, 1053, 1129, 1130, 1152, 1158, 1159, 1160, 1161, 1203, 1226}),
}
"""The kinds of errors by the numbers of server errors; those from 2000 on are of the client, and any other ``db``."""

_RETRYABLE = frozenset({1040, 1042, 1053, 1152, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1614, 2003, 2006, 2013, 2055})

# JSON is a value; a time of day is text, as in the other kinds
_DECODERS = conversions | {FIELD_TYPE.JSON: loads_exact, FIELD_TYPE.TIME: str}


_DECIMALS = frozenset({FIELD_TYPE.DECIMAL, FIELD_TYPE.NEWDECIMAL})


class MysqlDatabase(Database):
    """A database of a server.

    Args:
        arguments: of ``pymysql.connect``; see :func:`mysql_arguments`.
    """

    dialect = "mysql"
    placeholder = "%s"
    mark = "`"
    same = "<=>"
    insert_new = "INSERT IGNORE INTO"
    errors = (pymysql.err.Error, pymysql.err.Warning)
    simple_types = (str, int, float, bytes, Decimal, dt.date, dt.time, dt.timedelta)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    def connect(self) -> Any:
        """Connects; the server commits each statement until a transaction begins."""
        return pymysql.connect(
            **self._arguments,
            charset="utf8mb4",
            autocommit=True,
            conv=_DECODERS,
            connect_timeout=CONNECT_SECONDS,
            cursorclass=SSCursor,
            local_infile=False,
            init_command=SLOW_READER,
        )

    def begin(self, connection: Any, *, reads: bool) -> None:
        """Begins a transaction of the server's isolation level."""
        connection.begin()

    def interrupt(self, connection: Any) -> None:
        """Ends the connection at the server, through a second one; if there is none, from this side."""
        try:
            with contextlib.closing(self.connect()) as other:
                other.query(f"KILL {connection.thread_id()}")
        except (*self.errors, OSError):
            with contextlib.suppress(OSError, AttributeError):
                connection._sock.shutdown(socket.SHUT_RDWR)

    def close(self, connection: Any) -> None:
        """Closes a connection, also one whose rows are not all read."""
        result = getattr(connection, "_result", None)
        if result is not None:
            result.unbuffered_active = False  # else the cursor would read all remaining rows first
        connection.close()

    def value(self, value: Any) -> Any:
        """Returns an instant with its offset, which the driver would drop, and others as every database."""
        is_instant = isinstance(value, dt.datetime) and value.tzinfo is not None
        return value.isoformat() if is_instant else super().value(value)

    def converter(self, column: Sequence[Any], numbers: Numbers) -> Convert:
        """Returns integers for decimals without places, and text or doubles for other decimals."""
        if column[1] in _DECIMALS and column[5] == 0:
            return integer
        if column[1] in _DECIMALS and numbers is Numbers.FLOAT:
            return lambda value: None if value is None else float(value)
        return row_value

    def arrow_types(self, description: Sequence[Sequence[Any]]) -> dict[str, pa.DataType]:
        """Returns the types of decimals, with the scale of each column, and of numbers and times."""
        import pyarrow as pa

        types = {FIELD_TYPE.DATE: pa.date32(), FIELD_TYPE.DOUBLE: pa.float64(), FIELD_TYPE.FLOAT: pa.float64()}
        types |= dict.fromkeys((FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP), pa.timestamp("us"))
        exact = {column[0]: pa.decimal128(38, column[5]) for column in description if column[1] in _DECIMALS}
        return {column[0]: types[column[1]] for column in description if column[1] in types} | exact

    def prepare_writing(self, connection: Any) -> None:
        """Makes the session refuse values that do not fit, and read and write instants in UTC."""
        connection.query(UTC_AND_STRICT)

    def check_table(self, connection: Any, table: str) -> None:
        """Raises ``ToolError`` for a table of an engine without transactions."""
        schema, _, name = table.rpartition(".")
        cursor = self.execute(connection, SELECT_ENGINE, (schema or None, name))
        for (engine,) in cursor.fetchall():
            if engine.lower() not in TRANSACTIONAL:
                raise ToolError(
                    f"table {table} has the engine {engine}, which has no transactions: rows of a failed or repeated "
                    f"write would stay; ALTER TABLE {self.quoted(table)} ENGINE = InnoDB",
                    kind="schema",
                )

    def written(self, value: Any, type_code: Any) -> Any:
        """Returns instants in UTC, without their offset, for the types that have none."""
        if type_code in (FIELD_TYPE.TIMESTAMP, FIELD_TYPE.DATETIME):
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    value = dt.datetime.fromisoformat(value)
            if isinstance(value, dt.datetime) and value.tzinfo is not None:
                value = value.astimezone(dt.UTC).replace(tzinfo=None)
        return self.value(value)

    def upsert(self, keys: Sequence[str], columns: Sequence[str]) -> str:
        """Returns ``ON DUPLICATE KEY``, which applies to every unique key of the table."""
        changed = [name for name in columns if name not in keys] or list(keys)[:1]
        updates = ", ".join(f"{name} = VALUES({name})" for name in map(self.quoted_part, changed))
        return f" ON DUPLICATE KEY UPDATE {updates}"

    def failure(self, error: BaseException) -> Failure:
        """Returns the meaning of an error by its number."""
        number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        default: ErrorKind = "db_connection" if 2000 <= number < 3000 else "db"
        kind = next((kind for kind, numbers in _KINDS.items() if number in numbers), default)
        return Failure(kind, str(number) if number else None, number in _RETRYABLE)

    def text(self, error: BaseException) -> str:
        """Returns the server's message with its number."""
        number, *rest = error.args or (type(error).__name__,)
        return f"{' '.join(map(str, rest))} ({number})" if rest else str(number)


def mysql_arguments(credential: Credential) -> dict[str, Any]:
    """Returns the arguments of ``pymysql.connect`` for a mysql credential: ``url``, or host, port, user and others.

    ``sslmode``: ``disable``, ``prefer`` (the default), ``require`` (encrypted, any certificate), ``verify-ca`` or
    ``verify-full``, with the authorities of ``ssl_ca`` or of the system.

    Raises:
        CredentialError: it has neither ``url`` nor ``host``, or an unknown ``sslmode``.
    """
    fields = dict(credential.data)
    url = credential.get("url", "dsn", "connection_string", "uri")
    if url is not None:
        parts = urlsplit(str(url))
        try:
            port = parts.port
        except ValueError:
            raise CredentialError(f"credential {credential.name!r} of type mysql: its url has no valid port") from None
        fields |= {
            "host": parts.hostname,
            "port": port,
            "user": None if parts.username is None else unquote(parts.username),
            "password": None if parts.password is None else unquote(parts.password),
            "database": unquote(parts.path.lstrip("/")) or None,
            **{name.replace("-", "_"): text for name, text in parse_qsl(parts.query)},
        }
    resolved = Credential(credential.name, credential.type, {name: item for name, item in fields.items() if item})
    where = f"credential {credential.name!r} of type mysql"
    host, unix_socket = resolved.get("host", "hostname", "db_host"), resolved.get("unix_socket", "socket")
    if host is None and unix_socket is None:
        raise CredentialError(f"{where} has neither 'url' nor 'host'")
    arguments = {
        "host": host,
        "unix_socket": unix_socket,
        "port": int(resolved.get("port", "db_port", default=PORT)),
        "user": resolved.get("user", "username", "db_user"),
        "password": resolved.get("password", "db_password"),
        "database": resolved.get("database", "dbname", "db_name", "schema"),
    }
    return {name: item for name, item in arguments.items() if item is not None} | _encryption(resolved, where)


def _encryption(credential: Credential, where: str) -> dict[str, Any]:
    words = {"disabled": "disable", "preferred": "prefer", "required": "require", "true": "require", "false": "disable"}
    word = str(credential.get("sslmode", "ssl_mode", "ssl", default="prefer")).lower().replace("_", "-")
    mode = {"verify-identity": "verify-full"}.get(word, words.get(word, word))
    authorities = credential.get("ssl_ca", "sslrootcert")
    if mode == "prefer" and authorities is not None:
        mode = "verify-full"
    match mode:
        case "disable":
            return {"ssl_disabled": True}
        case "prefer":
            return {}
        case "require" | "verify-ca" | "verify-full":
            pass
        case _:
            modes = "disable, prefer, require, verify-ca, verify-full"
            raise CredentialError(f"{where}: sslmode {word!r} is unknown; write {modes}")
    try:
        context = ssl.create_default_context(cafile=authorities)
        if mode != "verify-full":
            context.check_hostname = False
        if mode == "require":
            context.verify_mode = ssl.CERT_NONE
        certificate = credential.get("ssl_cert", "sslcert")
        if certificate is not None:
            context.load_cert_chain(certificate, credential.get("ssl_key", "sslkey"))
    except (OSError, ValueError) as error:
        raise CredentialError(f"{where}: its certificates cannot be read: {error}") from None
    return {"ssl": context}
