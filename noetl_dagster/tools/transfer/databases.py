"""Databases behind DB-API as a source of transfers, SQLite and MySQL as a target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import orjson

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.sql.databases.base import Database, Session, open_session
from noetl_dagster.tools.sql.databases.binding import bind
from noetl_dagster.tools.sql.databases.places import find_database
from noetl_dagster.tools.sql.databases.tool import read_rows
from noetl_dagster.tools.sql.databases.writing import TableWriter, create_bookkeeping
from noetl_dagster.tools.sql.drift import Drift
from noetl_dagster.tools.sql.tables import WriteMode
from noetl_dagster.tools.transfer.chunks import (
    Transfer,
    TransferChunk,
    TransferOutcome,
    TransferSource,
)
from noetl_dagster.tools.transfer.options import TransferEnd, Verify
from noetl_dagster.tools.transfer.staging import digest_of, refuse_if_over

# ? is a placeholder
CREATE_LEDGER = (
    "CREATE TABLE IF NOT EXISTS noetl_transfer "
    "(id VARCHAR(64) NOT NULL PRIMARY KEY, execution_id BIGINT NOT NULL, outcome TEXT)"
)
ENTER = "noetl_transfer (id, execution_id) VALUES (?, ?)"
SELECT_OUTCOME = "SELECT outcome FROM noetl_transfer WHERE id = ?"
RECORD_OUTCOME = "UPDATE noetl_transfer SET outcome = ? WHERE id = ?"
FORGET = "DELETE FROM noetl_transfer WHERE id = ?"


async def database_of(end: TransferEnd, call: ToolCall, box: Toolbox) -> Database:
    """Returns the database of an end; raises ``ToolError`` if its credential is missing."""
    path = None if end.database is None else str(Path(call.folder, end.database))
    try:
        return await find_database(end.kind.value, box, auth=end.auth, path=path)
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


def open_database(end: TransferEnd, database: Database, call: ToolCall) -> AbstractAsyncContextManager[Session]:
    """Opens a connection for an end, whose instants are in UTC."""
    return open_session(database, f"transfer in step {call.step}, {end.kind}")


class DatabaseSource(TransferSource):
    """A table or a query, read in one transaction. Reading cannot resume in the middle."""

    seeks = False

    def __init__(self, session: Session, end: TransferEnd, size: int) -> None:
        self._session, self._end, self._size = session, end, size

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields the rows as mappings, with the values of the driver."""
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
        async with aclosing(cast(Any, read_rows(session, statements[0], self._size))) as rows:
            async for some in rows:
                yield TransferChunk([{name: _exact(value) for name, value in row.items()} for row in some])


def _exact(value: Any) -> Any:
    """Returns a decimal without places as an integer, since Arrow tables have doubles for decimals."""
    return int(value) if isinstance(value, Decimal) and value.as_tuple().exponent == 0 else value


async def write_database(transfer: Transfer) -> TransferOutcome:
    """Writes all rows in one transaction.

    Rows that are appended are written once, though the command is killed and runs again: the same transaction notes the
    outcome in the table ``noetl_transfer``, until the end of the command is in the log.

    Raises:
        ToolError: the database refuses a statement, or did not take the rows that were read.
    """
    target, call = transfer.target, transfer.call
    database = await database_of(target, call, transfer.box)
    async with open_database(target, database, call) as session:
        ledger = await _Ledger.open(session, transfer)
        async with session.transaction():
            if ledger is not None and (known := await ledger.found()) is not None:
                return known
            outcome = await _write(session, transfer)
            await refuse_if_over(transfer)
            if ledger is not None:
                await ledger.record(outcome)
    return outcome


async def _write(session: Session, transfer: Transfer) -> TransferOutcome:
    target, options = transfer.target, transfer.options
    writer = await session.run(TableWriter, session, target.table)
    if options.mode is WriteMode.REPLACE:
        await session.run(writer.delete, {})
    key = target.key if options.mode is WriteMode.UPSERT else ()
    drift = Drift(options.on_drift, writer.where, writer.columns)
    outcome = TransferOutcome(0, 0)
    async for chunk in transfer.chunks():
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
    return outcome


class _Ledger:
    """Notes the outcome of one call in the target's own database."""

    def __init__(self, session: Session, transfer: Transfer) -> None:
        call = transfer.call
        self._session, self._transfer = session, transfer
        self._id = digest_of([call.execution_id, call.command_id, call.task.name, call.number])

    @classmethod
    async def open(cls, session: Session, transfer: Transfer) -> _Ledger | None:
        """Returns the ledger of a call whose repetition would change the table; None if it needs none."""
        call, after = transfer.call, transfer.box.after
        if transfer.options.mode is not WriteMode.APPEND or not call.command_id or after is None:
            return None
        await session.run(create_bookkeeping, session, [CREATE_LEDGER], "mode: append")
        ledger = cls(session, transfer)
        after(call, ledger.discard)
        return ledger

    async def found(self) -> TransferOutcome | None:
        """Enters the call; returns its outcome if it has been written before. Waits for another process that writes."""
        session = self._session
        enter = f"{session.database.insert_new} {ENTER}"
        await session.run(session.fetch, enter, self._id, self._transfer.call.execution_id)
        [(outcome,)] = await session.run(session.fetch, SELECT_OUTCOME, self._id)
        return None if outcome is None else TransferOutcome(**orjson.loads(outcome))

    async def record(self, outcome: TransferOutcome) -> None:
        """Records the outcome, which is committed together with the rows."""
        text = orjson.dumps(asdict(outcome)).decode()
        await self._session.run(self._session.fetch, RECORD_OUTCOME, text, self._id)

    async def discard(self) -> None:
        """Forgets the call, when the end of its command is in the log."""
        transfer = self._transfer
        database = await database_of(transfer.target, transfer.call, transfer.box)
        async with open_database(transfer.target, database, transfer.call) as session, session.transaction():
            await session.run(session.fetch, FORGET, self._id)
