"""Finds the database that a call, an end of a transfer or a sink names."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import CredentialError
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.sql.databases.base import Database


async def find_database(kind: str, context: ToolContext, *, auth: Any = None, path: str | None = None) -> Database:
    """Returns the database of a kind.

    Args:
        auth: of the others: a credential of the type that the kind has.
        path: of sqlite: its file, already checked; None: in memory.

    Raises:
        CredentialError: the credential is missing, or of another type.
    """
    if kind == "sqlite":
        from noetl_dagster.tools.sql.databases.sqlite import IN_MEMORY, SqliteDatabase

        return SqliteDatabase(path or IN_MEMORY)
    credential = await context.credentials.resolve(auth, CredentialType(kind))
    if credential is None:
        raise CredentialError(f"no credential is named; write auth: <name of a {kind} credential>")
    if kind == "mysql":
        from noetl_dagster.tools.sql.databases.mysql import MysqlDatabase, mysql_arguments

        return MysqlDatabase(mysql_arguments(credential))
    from noetl_dagster.tools.sql.databases import adbc

    if kind == "snowflake":
        return adbc.SnowflakeDatabase(adbc.snowflake_options(credential))
    return adbc.BigqueryDatabase(adbc.bigquery_options(credential))
