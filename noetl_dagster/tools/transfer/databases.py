"""Databases behind DB-API as a source of transfers, SQLite and MySQL as a target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.tools.base import ToolCall, ToolContext
from noetl_dagster.tools.sql.databases.base import Database, DatabaseSession, open_session
from noetl_dagster.tools.sql.databases.binding import bind
from noetl_dagster.tools.sql.databases.tool import find_database, read_rows
from noetl_dagster.tools.sql.databases.writing import TableWriter, create_bookkeeping
from noetl_dagster.tools.sql.tables import Drift, WriteMode
from noetl_dagster.tools.transfer.chunks import (
    Transfer,
    TransferChunk,
    TransferOutcome,
    TransferSource,
)
from noetl_dagster.tools.transfer.options import TransferEnd, Verify
from noetl_dagster.tools.transfer.staging import StagedTable, TablePosition

# ? is a placeholder
CREATE_POSITIONS = (
    "CREATE TABLE IF NOT EXISTS noetl_transfer "
    "(id VARCHAR(64) NOT NULL PRIMARY KEY, execution_id BIGINT NOT NULL, position TEXT)"
)
ENTER = "noetl_transfer (id, execution_id) VALUES (?, ?)"
SELECT_POSITION = "SELECT position FROM noetl_transfer WHERE id = ?"
RECORD_POSITION = "UPDATE noetl_transfer SET position = ? WHERE id = ?"
FORGET = "DELETE FROM noetl_transfer WHERE id = ?"


async def database_of(end: TransferEnd, call: ToolCall, context: ToolContext) -> Database:
    """Returns the database of an end; raises ``ToolError`` if its credential is missing."""
    path = None if end.database is None else str(Path(call.folder, end.database))
    try:
        return await find_database(end.kind.value, context, auth=end.auth, path=path)
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


def open_database(end: TransferEnd, database: Database, call: ToolCall) -> AbstractAsyncContextManager[DatabaseSession]:
    """Opens a connection for an end, whose instants are in UTC."""
    return open_session(database, f"transfer in step {call.step}, {end.kind}")


class DatabaseSource(TransferSource):
    """A table or a query, read in one transaction. Reading cannot resume in the middle."""

    seeks = False

    def __init__(self, session: DatabaseSession, end: TransferEnd, size: int, *, tables: bool) -> None:
        self._session, self._end, self._size, self._tables = session, end, size, tables

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields Arrow tables if they are wanted, else rows with the values of the driver."""
        session, end = self._session, self._end
        database = session.database
        query = end.query or f"SELECT * FROM {database.quoted(end.table)}"
        try:
            statements = bind([query], end.params, database.dialect, database.placeholder)
        except KeyError as error:
            raise ToolError(f"transfer: source.params has no value for {error.args[0]}", kind="schema") from None
        if len(statements) != 1:
            raise ToolError(f"transfer: source.query needs one statement, it has {len(statements)}", kind="schema")
        await session.run(database.prepare_writing, session.connection)
        async with aclosing(cast(Any, read_rows(session, statements[0], self._size, tables=self._tables))) as chunks:
            async for rows in chunks:
                yield TransferChunk(rows)


async def write_database(transfer: Transfer) -> TransferOutcome:
    """Writes all rows in one transaction.

    Appended rows are written once, even if the command is killed and runs again. The other modes may be repeated.

    Raises:
        ToolError: the database refuses a statement, or did not take the rows that were read.
    """
    call = transfer.call
    database = await database_of(transfer.target, call, transfer.tool_context)
    async with open_database(transfer.target, database, call) as session:
        target = DatabaseTable(transfer, session)
        if target.keeps_position:
            await session.run(create_bookkeeping, session, [CREATE_POSITIONS], "mode: append")
            transfer.tool_context.after(call, target.discard)
        return await target.run()


class DatabaseTable(StagedTable):
    """Copies all rows in one transaction, which also records the outcome in the table ``noetl_transfer``."""

    def __init__(self, transfer: Transfer, session: DatabaseSession) -> None:
        super().__init__(transfer, lasting=False)
        self.keeps_position = self._options.mode is WriteMode.APPEND
        self._session = session

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Begins the transaction; its first statement waits for another process that writes for the command."""
        session = self._session
        async with session.transaction():
            if self.keeps_position:
                enter = f"{session.database.insert_new} {ENTER}"
                await session.run(session.fetch, enter, self._digest, self._call.execution_id)
            yield

    async def _found(self) -> TablePosition | None:
        if not self.keeps_position:
            return None
        [(position,)] = await self._session.run(self._session.fetch, SELECT_POSITION, self._digest)
        return None if position is None else TablePosition.model_validate_json(position)

    async def _fits(self, position: TablePosition) -> bool:
        return False  # no rows are staged

    async def _create(self) -> None:
        pass

    async def stage(self) -> None:
        """Stages nothing: see :meth:`publish`."""

    async def publish(self) -> TransferOutcome:
        """Writes all rows, and records the outcome."""
        session, options, target = self._session, self._options, self._transfer.target
        writer = await session.run(TableWriter, session, target.table)
        if options.mode is WriteMode.REPLACE:
            await session.run(writer.delete, {})
        key = target.key if options.mode is WriteMode.UPSERT else ()
        drift = Drift(options.on_drift, writer.where, writer.columns)
        outcome = TransferOutcome(0, 0)
        async for chunk in self._transfer.chunks():
            names = writer.spelled(chunk.columns)
            columns, _ = drift.sort(list(names), str)
            fitting = {column: names[column] for column in columns}
            outcome.written += await session.run(writer.insert, chunk.as_rows(), fitting, key)
            outcome.rows += chunk.rows
        outcome.drift = drift.report()
        if options.verify is not Verify.NONE and outcome.rows != outcome.written:
            raise ToolError(
                f"{outcome.rows} rows were read, and {writer.where} took {outcome.written}; the table is as it was. "
                "With verify: none this is no error",
                kind="db",
            )
        position = await self._end(outcome)
        if self.keeps_position:
            await session.run(session.fetch, RECORD_POSITION, position.model_dump_json(), self._digest)
        return outcome

    async def discard(self) -> None:
        """Forgets the command when its end is in the log."""
        transfer = self._transfer
        database = await database_of(transfer.target, transfer.call, transfer.tool_context)
        async with open_database(transfer.target, database, transfer.call) as session, session.transaction():
            await session.run(session.fetch, FORGET, self._digest)
