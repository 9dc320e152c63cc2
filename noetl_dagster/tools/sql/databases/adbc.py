"""Snowflake and BigQuery, through their drivers of ADBC (Arrow Database Connectivity)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import adbc_driver_manager
import orjson
import pyarrow as pa

from noetl_dagster.errors import CredentialError, ErrorKind
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.access.credential_types import Credential
from noetl_dagster.tools.rows.arrow import json_rows
from noetl_dagster.tools.sql.connection import RETRYABLE_CLASSES, kind_of_state
from noetl_dagster.tools.sql.databases.base import Database, Failure
from noetl_dagster.tools.sql.fetching import FETCHED

_KINDS: Mapping[str, ErrorKind] = {
    "UNAUTHENTICATED": "auth",
    "UNAUTHORIZED": "auth",
    "TIMEOUT": "db_timeout",
    "CANCELLED": "db_timeout",
    "IO": "db_connection",
    "INTEGRITY": "db_constraint",
    "ALREADY_EXISTS": "db_constraint",
}
"""The kinds of errors by the status of ADBC, if the driver reports no SQLSTATE that tells more."""


class AdbcDatabase(Database):
    """A database behind a driver of ADBC.

    Args:
        options: of the driver's database; see :func:`snowflake_options`.

    Attributes:
        driver: its module.
        transactions: whether the statements of a call are one transaction.
    """

    placeholder = "?"
    commits_one = True
    errors = (adbc_driver_manager.Error,)
    simple_types = (str, int, float, bytes, Decimal, datetime)
    driver: ClassVar[str]
    transactions: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._cursors: list[Any] = []

    def connect(self) -> Any:
        """Connects; each statement is committed until a transaction begins."""
        module = import_module(f"{self.driver}.dbapi")
        return module.connect(db_kwargs=dict(self._options), autocommit=True)

    def cursor(self, connection: Any) -> Any:
        """Returns a cursor, whose statement :meth:`interrupt` cancels."""
        self._cursors.append(connection.cursor())
        return self._cursors[-1]

    def close(self, connection: Any) -> None:
        """Closes the cursors, which ADBC requires, and the connection."""
        for cursor in self._cursors:
            with self.ignored():
                cursor.close()
        connection.close()

    def begin(self, connection: Any, *, reads: bool) -> None:
        """Begins a transaction, if the database has them."""
        if self.transactions:
            connection.adbc_connection.set_autocommit(False)

    def commit(self, connection: Any) -> None:
        """Commits the transaction, if the database has them."""
        if self.transactions:
            connection.commit()
            connection.adbc_connection.set_autocommit(True)

    def undo(self, connection: Any) -> None:
        """Rolls the transaction back, if the database has them."""
        if self.transactions:
            super().undo(connection)

    def interrupt(self, connection: Any) -> None:
        """Cancels the statement that another thread runs, if the driver can; else the call waits for its end."""
        with suppress(*self.errors):
            if self._cursors:
                self._cursors[-1].adbc_cancel()

    def rows(self, cursor: Any, numbers: Numbers) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of a cursor, by the Arrow types of their columns."""
        count = 0
        for table in self.tables(cursor, FETCHED):
            yield json_rows(table, numbers, count)
            count += len(table)

    def tables(self, cursor: Any, size: int) -> Iterator[pa.Table]:
        """Yields the Arrow tables of the driver, in parts of at most ``size`` rows."""
        for batch in cursor.fetch_record_batch():
            for start in range(0, batch.num_rows, size):
                yield pa.Table.from_batches([batch.slice(start, size)])

    def upsert(self, keys: Sequence[str], columns: Sequence[str]) -> str:
        """Is not used: these kinds are no targets."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> Failure:
        """Returns the meaning of an error by its SQLSTATE, or else by its status."""
        state = getattr(error, "sqlstate", None) or ""
        status = getattr(getattr(error, "status_code", None), "name", "UNKNOWN")
        kind = kind_of_state(state) if state else "db"
        if kind == "db":
            kind = _KINDS.get(status, "db")
        retryable = kind == "db_connection" or state.startswith(RETRYABLE_CLASSES)
        return Failure(kind, state or status, retryable)


class SnowflakeDatabase(AdbcDatabase):
    """A database of Snowflake."""

    dialect = "snowflake"
    driver = "adbc_driver_snowflake"

    def affected(self, columns: Sequence[str], fetch: Callable[[], Sequence[Sequence[Any]]]) -> int | None:
        """Returns the sum of what a statement reports, as ``number of rows inserted``; 0 for a ``status``."""
        if columns == ["status"]:
            fetch()
            return 0
        if not all(name.startswith("number of ") for name in columns):
            return None
        return sum(int(number) for row in fetch() for number in row)


class BigqueryDatabase(AdbcDatabase):
    """A project of BigQuery. Each statement is a job of its own, so there is no transaction around them."""

    dialect = "bigquery"
    mark = "`"
    driver = "adbc_driver_bigquery"
    transactions = False


def snowflake_options(credential: Credential) -> dict[str, str]:
    """Returns the options of the driver for a snowflake credential.

    It has ``account`` and ``user``, and ``password``, ``private_key`` (PEM, PKCS 8) or ``private_key_path``, or
    ``token`` (OAuth); also ``warehouse``, ``database``, ``schema``, ``role``, and ``host``, ``port`` and ``protocol``
    of a proxy.

    Raises:
        CredentialError: the account, the user or the proof is missing, or the file of the key cannot be read.
    """
    where, prefix = f"credential {credential.name!r} of type snowflake", "adbc.snowflake.sql."
    account, user = credential.get("account", "sf_account"), credential.get("user", "username", "sf_user")
    password, token = credential.get("password", "sf_password"), credential.get("token", "oauth_token", "access_token")
    key, path = credential.get("private_key"), credential.get("private_key_path", "private_key_file")
    if account is None:
        raise CredentialError(f"{where} has no 'account'")
    if path is not None:
        try:
            key = Path(str(path)).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialError(f"{where}: its private_key_path cannot be read: {type(error).__name__}") from None
    if token is None and (user is None or (password is None and key is None)):
        raise CredentialError(f"{where} needs 'user' with 'password' or 'private_key', or 'token'")
    options = {
        "username": user,
        f"{prefix}account": account,
        f"{prefix}client_option.disable_telemetry": "true",
        f"{prefix}db": credential.get("database", "dbname", "db", "sf_database"),
        f"{prefix}schema": credential.get("schema", "sf_schema"),
        f"{prefix}warehouse": credential.get("warehouse", "sf_warehouse"),
        f"{prefix}role": credential.get("role", "sf_role"),
        f"{prefix}region": credential.get("region"),
        f"{prefix}uri.host": credential.get("host"),
        f"{prefix}uri.port": credential.get("port"),
        f"{prefix}uri.protocol": credential.get("protocol"),
    }
    if token is not None:
        options |= {f"{prefix}auth_type": "auth_oauth", f"{prefix}client_option.auth_token": token}
    elif key is not None:
        options |= {
            f"{prefix}auth_type": "auth_jwt",
            f"{prefix}client_option.jwt_private_key_pkcs8_value": key,
            f"{prefix}client_option.jwt_private_key_pkcs8_password": credential.get("private_key_passphrase"),
        }
    else:
        options["password"] = password
    return {name: str(item) for name, item in options.items() if item is not None}


def bigquery_options(credential: Credential) -> dict[str, str]:
    """Returns the options of the driver for a bigquery credential.

    It has ``project``, ``dataset`` and ``location``, and ``service_account_key`` (its JSON, or a mapping) or
    ``service_account_path``; without a key the credentials of the environment count.

    Raises:
        CredentialError: there is no project.
    """
    prefix = "adbc.bigquery.sql."
    key = credential.get("service_account_key", "service_account", "credentials_json", "key")
    path = credential.get("service_account_path", "keyfile", "credentials_path")
    if isinstance(key, str):
        with suppress(orjson.JSONDecodeError):
            key = orjson.loads(key)
    own = key.get("project_id") if isinstance(key, Mapping) else None
    project = credential.get("project", "project_id", default=own)
    if project is None:
        raise CredentialError(f"credential {credential.name!r} of type bigquery has no 'project'")
    options = {
        f"{prefix}project_id": project,
        f"{prefix}dataset_id": credential.get("dataset", "dataset_id"),
        f"{prefix}location": credential.get("location"),
    }
    if key is not None:
        text = orjson.dumps(dict(key)).decode() if isinstance(key, Mapping) else str(key)
        options |= {
            f"{prefix}auth_type": f"{prefix}auth_type.json_credential_string",
            f"{prefix}auth_credentials": text,
        }
    elif path is not None:
        options |= {f"{prefix}auth_type": f"{prefix}auth_type.json_credential_file", f"{prefix}auth_credentials": path}
    return {name: str(item) for name, item in options.items() if item is not None}
