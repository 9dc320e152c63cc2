"""``kind: ducklake``: a DuckLake, attached to a DuckDB of this call. Its catalog is in PostgreSQL or in a file.

The extensions of DuckDB come from wheels, each for one version of DuckDB; nothing is downloaded. DuckLake reads
and writes its files through the file systems that DuckDB has from this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.extras import needs_extra
from noetl_dagster.playbook.templates.environment import sql_literal
from noetl_dagster.tools.access.clients import postgres_arguments
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.files import check_path, written_in
from noetl_dagster.tools.sql.tables import quoted

DEFAULT_NAME = "lake"
CATALOG_FIELDS = ("catalog", "catalog_connection")
_SECRET_FIELDS = {"host": "HOST", "port": "PORT", "dbname": "DATABASE", "user": "USER", "password": "PASSWORD"}
_CATALOG, _LAKE = "noetl_catalog", "noetl_lake"


@dataclass(frozen=True, slots=True)
class Lake:
    """A DuckLake.

    Attributes:
        name: in SQL, where it is the default database.
        catalog: libpq's parameters of the catalog in PostgreSQL, or the path of its file.
        data_path: URI or path of the folder of its files; None: as the catalog says.
    """

    name: str
    catalog: Mapping[str, str] | str
    data_path: str | None
    schema: str | None = None

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attaches the lake, and makes it the default database.

        The catalog's password is in a secret of DuckDB, so it is in no statement that an error or a query could show.
        """
        connection.execute("SET autoinstall_known_extensions = false")  # nor does DuckLake ask for one
        _load(connection, "ducklake")
        if self.data_path is not None and "://" in self.data_path:
            _load(connection, "httpfs")  # which DuckLake requires for a bucket, and the file system here replaces
        options = []
        if isinstance(self.catalog, str):
            path = f"ducklake:{self.catalog}"
            options += [] if self.data_path is None else [f"DATA_PATH {sql_literal(self.data_path)}"]
        else:
            _load(connection, "postgres_scanner")
            path = f"ducklake:{_LAKE}"
            self._create_secrets(connection, self.catalog)
        if self.schema is not None:
            options.append(f"METADATA_SCHEMA {sql_literal(self.schema)}")
        listed = f" ({', '.join(options)})" if options else ""
        connection.execute(f"ATTACH {sql_literal(path)} AS {quoted(self.name)}{listed}")
        connection.execute(f"USE {quoted(self.name)}")

    def _create_secrets(self, connection: duckdb.DuckDBPyConnection, catalog: Mapping[str, str]) -> None:
        own = ", ".join(
            f"{word} {sql_literal(catalog[name])}" for name, word in _SECRET_FIELDS.items() if name in catalog
        )
        connection.execute(f"CREATE SECRET {_CATALOG} (TYPE postgres, {own})")
        # sslmode and the like, which a secret does not take
        rest = " ".join(f"{name}={_conninfo(text)}" for name, text in catalog.items() if name not in _SECRET_FIELDS)
        fields = [
            f"METADATA_PATH {sql_literal(rest)}",
            f"METADATA_PARAMETERS MAP {{'TYPE': 'postgres', 'SECRET': '{_CATALOG}'}}",
        ]
        if self.data_path is not None:
            fields.append(f"DATA_PATH {sql_literal(self.data_path)}")
        connection.execute(f"CREATE SECRET {_LAKE} (TYPE ducklake, {', '.join(fields)})")


def _conninfo(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _load(connection: duckdb.DuckDBPyConnection, extension: str) -> None:
    """Loads an extension from its wheel; raises ``ToolError`` if there is none for this version of DuckDB."""
    package, version = find_spec(f"duckdb_extension_{extension}"), duckdb.__version__
    folder = None if package is None or package.origin is None else Path(package.origin).parent
    file = None if folder is None else folder / "extensions" / f"v{version}" / f"{extension}.duckdb_extension"
    if file is None or not file.is_file():
        raise ToolError(
            f"{needs_extra('kind ducklake', 'ducklake')}; the extension {extension} is not installed for DuckDB "
            f"{version}: each of its wheels is for one version of DuckDB, which the extra selects",
            kind="policy",
        )
    connection.execute(f"LOAD {sql_literal(str(file))}")


async def lake_of(call: ToolCall, context: ToolContext) -> Lake:
    """Returns the lake of a call.

    Raises:
        ToolError: its catalog is missing, or a template leads one of its paths out of its folder.
    """
    config = call.config
    catalog_field = next((config[name] for name in CATALOG_FIELDS if config.get(name)), None)
    data_path = config.get("data_path")
    if data_path is not None:
        data_path = str(data_path)
        _check(data_path, "data_path", call, context)
        if not urlsplit(data_path).scheme:
            data_path = str(Path(call.folder, data_path))
    catalog: Mapping[str, str] | str
    if isinstance(catalog_field, str) and (path := _file(catalog_field)) is not None:
        _check(path, "catalog", call, context)
        catalog = str(Path(call.folder, path))
        Path(catalog).parent.mkdir(parents=True, exist_ok=True)
    else:
        catalog = await _parameters(catalog_field if catalog_field is not None else call.auth, call, context)
    text = config.get("metadata_schema")
    name = str(config.get("catalog_name") or DEFAULT_NAME)
    return Lake(name, catalog, data_path, None if text is None else str(text))


def _check(path: str, field: str, call: ToolCall, context: ToolContext) -> None:
    names = CATALOG_FIELDS if field == "catalog" else (field,)
    written = written_in(call.task.config, *names)
    check_path(path, written, call.folder, context.settings, f"ducklake in step {call.step}, {field}")


def _file(catalog: str) -> str | None:
    """Returns the path that a catalog is; None for an address or the name of a credential."""
    path = catalog.removeprefix("ducklake:").removeprefix("duckdb:")
    is_file = path != catalog or "/" in path or Path(path).suffix in (".ducklake", ".duckdb", ".db")
    return path if is_file and "://" not in path and not path.startswith("postgres:") else None


async def _parameters(auth: Any, call: ToolCall, context: ToolContext) -> Mapping[str, str]:
    if isinstance(auth, str) and ("://" in auth or auth.removeprefix("ducklake:").startswith("postgres:")):
        auth = {"type": "postgres", "url": auth.removeprefix("ducklake:").removeprefix("postgres:")}
    try:
        credential = await context.credentials.resolve(auth, CredentialType.POSTGRES)
        if credential is None:
            raise CredentialError("no catalog is named; write auth: <a postgres credential>, or catalog: <a file>")
        return _libpq(credential)
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


def _libpq(credential: Credential) -> Mapping[str, str]:
    arguments = postgres_arguments(credential)
    if "dsn" in arguments:
        import psycopg2
        from psycopg2.extensions import parse_dsn

        try:
            return {**parse_dsn(arguments.pop("dsn")), **arguments}
        except psycopg2.ProgrammingError:  # its message quotes the address
            raise CredentialError(f"credential {credential.name!r} of type postgres: its url is malformed") from None
    named = {"database": "dbname", "ssl": "sslmode"}
    return {named.get(name, name): str(value) for name, value in arguments.items()}
