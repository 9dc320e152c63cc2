"""The kinds sqlite, mysql, snowflake and bigquery: SQL with bound parameters, one transaction a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from noetl_dagster.errors import CredentialError
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult, count_of, time_limit
from noetl_dagster.tools.chunks.writer import ChunkWriter
from noetl_dagster.tools.files import check_path, written_in
from noetl_dagster.tools.rows.columns import check_names
from noetl_dagster.tools.sql.databases.base import Database, DatabaseSession, open_session
from noetl_dagster.tools.sql.databases.binding import bind, needs_own_transaction, only_reads
from noetl_dagster.tools.sql.databases.sqlite import IN_MEMORY
from noetl_dagster.tools.sql.fetching import TABLE_ROWS, FetchedRows, result_of_batches, store_table
from noetl_dagster.tools.sql.running import bound, numbers_of, promoted, texts_of, wants_table
from noetl_dagster.tools.sql.statements import BoundStatement


class DatabaseTool(Tool):
    """Runs SQL in a database behind DB-API; ``task.kind`` selects it.

    Input: ``command`` (one or more statements, or a list of them) or ``script``; ``params`` as for postgres, and
    ``?`` for the next of a list; ``timeout`` seconds; of sqlite ``database``, a file, of the others ``auth``.

    Output: as of postgres. Many rows are stored in chunks of at most ``chunk_size`` rows while they are read. With
    ``as: table`` the rows of the one statement are a Parquet table by reference.

    All statements run in one transaction, unless one controls transactions itself, or cannot run in one. In
    BigQuery each statement is committed by itself.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the call's statements."""
        database = await _database(call, context)
        texts, params = await texts_of(call, context)
        statements = bound(call, params, lambda: bind(texts, params, database.dialect, database.placeholder))
        where = f"{call.task.kind} in step {call.step}"
        if wants_table(call):
            return await self._table(call, context, database, statements, where)
        async with time_limit(call), await ChunkWriter.open(call, context, size=count_of(call, "chunk_size")) as writer:
            if writer.is_whole:
                return ToolResult(ref=await writer.finish({}))
            rows = FetchedRows(writer, call, context)
            writer.holds_back = not all(only_reads(one.text) for one in statements)
            async with open_session(database, where) as session:
                data = await session.run(_run, session, statements, rows, numbers_of(call))
            if not rows.in_chunks:
                return ToolResult(data=data)
            at = ("rows", f"command_{len(statements) - 1}.rows")
            return ToolResult(ref=await writer.finish(data, at))

    async def _table(
        self, call: ToolCall, context: ToolContext, database: Database, statements: Sequence[BoundStatement], where: str
    ) -> ToolResult:
        size = count_of(call, "chunk_size") or TABLE_ROWS

        async def tables() -> AsyncIterator[Any]:
            async with (
                open_session(database, where) as session,
                aclosing(cast(Any, read_rows(session, statements[0], size, tables=True))) as chunks,
            ):
                async for some in chunks:
                    yield some

        return await store_table(call, context, statements, tables)


async def _database(call: ToolCall, context: ToolContext) -> Database:
    path = call.config.get("database")
    path = None if path in (None, "", IN_MEMORY) else str(path)
    if path is not None:
        written = written_in(call.task.config, "database")
        check_path(path, written, call.folder, context.settings, f"{call.task.kind} in step {call.step}, database")
        path = str(Path(call.folder, path))
    auth = call.auth if call.auth is not None else call.config.get("credential")
    try:
        return await find_database(call.task.kind, context, auth=auth, path=path)
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


def _run(
    session: DatabaseSession, statements: Sequence[BoundStatement], rows: FetchedRows, numbers: Numbers
) -> dict[str, Any]:
    database, connection = session.database, session.connection
    texts = [statement.text for statement in statements]
    if any(map(needs_own_transaction, texts)) or (database.commits_one and len(texts) == 1):
        return _results(session, statements, rows, numbers)
    with database.transaction(connection, reads=all(map(only_reads, texts))):
        return _results(session, statements, rows, numbers)


def _results(
    session: DatabaseSession, statements: Sequence[BoundStatement], rows: FetchedRows, numbers: Numbers
) -> dict[str, Any]:
    results = []
    for index, statement in enumerate(statements):
        cursor = session.database.execute(session.connection, statement.text, statement.values)
        columns = [column[0] for column in cursor.description or ()]
        changed = session.database.affected(columns, cursor.fetchall) if columns else max(0, cursor.rowcount)
        if changed is None:
            last = rows if index == len(statements) - 1 else None
            results.append(result_of_batches(session.database.rows(cursor, numbers), columns, last))
        else:
            results.append({"status": "ok", "row_count": changed})
    return promoted(results)


async def read_rows(
    session: DatabaseSession, statement: BoundStatement, size: int, *, tables: bool
) -> AsyncIterator[Any]:
    """Yields the rows of a statement, ``size`` at a time: Arrow tables, or rows with the values of the driver."""
    database, connection = session.database, session.connection
    await session.run(lambda: database.begin(connection, reads=only_reads(statement.text)))
    cursor = await session.run(database.execute, connection, statement.text, statement.values)
    columns = [column[0] for column in cursor.description or ()]
    check_names(columns, "the result")
    if columns and tables:
        parts = database.tables(cursor, size)
        while (table := await session.run(next, parts, None)) is not None:
            yield table
    while columns and not tables and (batch := await session.run(cursor.fetchmany, size)):
        yield [dict(zip(columns, row, strict=True)) for row in batch]
    await session.run(database.commit, connection)


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
