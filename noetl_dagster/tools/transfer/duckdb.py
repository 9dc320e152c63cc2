"""DuckDB as a source, and as a target: in one transaction, or staged in the file chunk by chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.rows.arrow import arrow_table
from noetl_dagster.tools.rows.reader import threaded
from noetl_dagster.tools.sql.duckdb import exported, open_file
from noetl_dagster.tools.sql.tables import Drift, WriteMode, listed
from noetl_dagster.tools.transfer import staging
from noetl_dagster.tools.transfer.checksum import Checksum, as_read, compare_checksums, sum_of_table
from noetl_dagster.tools.transfer.chunks import Transfer, TransferChunk, TransferOutcome, TransferSource, duckdb_type
from noetl_dagster.tools.transfer.options import Resumable, TransferEnd, Verify
from noetl_dagster.tools.transfer.staging import (
    AUTO_BYTES,
    KEY_TYPES,
    StagedTable,
    TablePosition,
    can_resume,
    seeks_by_row,
)


class DuckdbSource(TransferSource):
    """A table, whose rows keep their order, or a query. Reading can resume in both if a query has ``order_by``."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, end: TransferEnd, size: int, path: str) -> None:
        self._connection, self._end, self._size = connection, end, size
        self.seeks = bool(end.order_by or not end.query)
        self.bytes = 0 if path == ":memory:" else Path(path).stat().st_size

    async def chunks(self, after: Any = None) -> AsyncIterator[TransferChunk]:
        """Yields Arrow tables, after the first ``after`` rows."""
        statement, done = self._end.statement(), int(after or 0)
        text, values = statement.text, list(statement.values) or None
        if self._end.order_by or done:
            order = f" ORDER BY {listed(self._end.order_by)}" if self._end.order_by else ""
            text = f"SELECT * FROM ({text.rstrip().rstrip(';')}\n) AS source{order} OFFSET {done}"
        relation = await asyncio.to_thread(self._connection.sql, text, params=values)
        if relation is None:
            raise ToolError("transfer: the query of the duckdb source gives no rows", kind="schema")
        async for batch in threaded(await asyncio.to_thread(exported(relation).to_arrow_reader, self._size)):
            done += batch.num_rows
            if batch.num_rows:
                yield TransferChunk(pa.Table.from_batches([batch]), done if self.seeks else None)


# quoted identifiers only
COLUMNS = """
SELECT column_name, data_type FROM duckdb_columns()
WHERE database_name = current_database() AND lower(table_name) = lower(?)
  AND lower(schema_name) = lower(coalesce(?, current_schema()))
ORDER BY column_index
"""
ADD_COLUMN = "ALTER TABLE {table} ADD COLUMN {column} {type}"
LIKE = "CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM {other} LIMIT 0"
EMPTY = "DELETE FROM {table}"
REPLACED = "DELETE FROM {table} USING {rows} AS new WHERE {same}"
INSERT = "INSERT INTO {table} BY NAME SELECT {columns} FROM {rows}"
DROP = "DROP TABLE IF EXISTS {table}"
POSITION = "SELECT position FROM noetl.sink_part WHERE target = ? AND part = ?"
RECORD = """
INSERT INTO noetl.sink_part (target, part, position, published) VALUES (?, ?, ?, CASE WHEN ? THEN now() END)
ON CONFLICT (target, part) DO UPDATE SET position = excluded.position, published = excluded.published
"""
FORGET = "DELETE FROM noetl.sink_part WHERE target = ? AND part = ?"


async def write_duckdb(transfer: Transfer) -> TransferOutcome:
    """Writes all rows; the table changes all at once or not at all. Creates a missing one like the first chunk.

    A command that is killed and runs again finds what it had written, in the ledger of the file.
    """
    target, options, source = transfer.target, transfer.options, transfer.source
    if target.database is None:
        raise ToolError("transfer: a duckdb target needs 'database', a file", kind="schema")
    resumes = can_resume(transfer, seeks=seeks_by_row(source), columns=KEY_TYPES)
    lasting = resumes and (options.resumable is Resumable.TRUE or source.bytes >= AUTO_BYTES)
    staged = DuckdbTarget(transfer, lasting=lasting)
    if lasting:
        transfer.tool_context.after(transfer.call, staged.discard)
    return await staged.run()


class DuckdbTarget(StagedTable):
    """Stages the rows of a table in the same file, in a table of the schema ``noetl`` that is named after the command.

    The outcome stays in the ledger, as that of a sink's part does. The file is open for the whole transfer, so that no
    other process can write to it; of two calls in one process the second one to change the ledger is refused.
    """

    def __init__(self, transfer: Transfer, *, lasting: bool) -> None:
        super().__init__(transfer, lasting=lasting)
        self._key = transfer.target.key if transfer.options.mode is WriteMode.UPSERT else ()
        self._path = str(Path(transfer.call.folder, str(transfer.target.database)))
        self._table = sql_identifier(transfer.target.table)
        self._stage = sql_identifier(f"noetl.transfer_{self._digest}")
        self._names = {self._table: transfer.target.table, self._stage: f"noetl.transfer_{self._digest}"}
        self._place = [transfer.target.table, f"transfer.{self._digest}"]
        self._connection: duckdb.DuckDBPyConnection
        self._rows: _Rows | None = None

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._connection = await asyncio.to_thread(open_file, self._path)
        try:
            yield
        finally:
            await asyncio.to_thread(self._connection.close)

    async def _run(self, query: str, *values: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: self._connection.execute(query, list(values)).fetchall())

    async def _found(self) -> TablePosition | None:
        rows = await self._run(POSITION, *self._place)
        return TablePosition.model_validate_json(rows[0][0]) if rows else None

    async def _fits(self, position: TablePosition) -> bool:
        staged = await asyncio.to_thread(self._types, self._stage)
        return bool(staged) and await self._is_unchanged(position.identity, position.after, position.rows)

    async def _create(self) -> None:
        await self._run("BEGIN")
        await self._run(DROP.format(table=self._stage))
        await self._record(self._position)
        await self._run("COMMIT")

    async def _record(self, position: TablePosition, *, published: bool = False) -> None:
        await self._run(RECORD, *self._place, position.model_dump_json(), published)

    async def stage(self) -> None:
        """Commits the rows after the position, chunk by chunk."""
        if not self._lasting:
            return
        position, due = self._position, time.monotonic() + staging.COMMIT_SECONDS
        await self._run("BEGIN")
        async for chunk in self._transfer.chunks(position.after):
            await self._insert(self._stage, chunk)
            position.rows += chunk.rows
            position.after = chunk.after
            if chunk.after is not None and time.monotonic() >= due:
                await self._commit()
                due = time.monotonic() + staging.COMMIT_SECONDS
        await self._commit(more=False)

    async def _commit(self, *, more: bool = True) -> None:
        """Commits what is staged together with the position behind it."""
        position, rows = self._position, self._rows
        if rows is not None:
            rows.compare()
            position.columns = list(dict.fromkeys([*position.columns, *rows.columns]))
            position.checksum = str(Checksum.of_text(position.checksum) + rows.take_checksum())
        await self._record(position)
        await self._run("COMMIT")
        if more:
            await self._run("BEGIN")

    async def _insert(self, table: str, chunk: TransferChunk) -> None:
        if self._rows is None:
            self._rows = await asyncio.to_thread(self._begin, table, chunk)
        await asyncio.to_thread(self._rows.insert, chunk)

    def _begin(self, table: str, chunk: TransferChunk) -> _Rows:
        """Creates the missing table, or a stage like the table; empties a table that is to be replaced."""
        connection = self._connection
        with _Registered(connection, chunk):
            staged = table != self._table
            like = self._table if staged and self._types(self._table) else "noetl_chunk"
            connection.execute(LIKE.format(table=table, other=like))
        if not staged and self._options.mode is WriteMode.REPLACE:
            connection.execute(EMPTY.format(table=table))
        drift = Drift(self._options.on_drift, f"duckdb table {self._table}", self._types(table))
        own = self._types(self._table)
        drift.added = {name: kind for name, kind in self._types(table).items() if own and name not in own}
        return _Rows(connection, table, self._key, drift, checked=self._options.verify is Verify.CHECKSUM)

    def _types(self, table: str) -> dict[str, str]:
        """Returns the types of the columns; empty if there is no such table."""
        # DESCRIBE of a missing table would end the transaction
        *schema, name = self._names[table].split(".")
        return dict(self._connection.execute(COLUMNS, [name, schema[-1] if schema else None]).fetchall())

    async def publish(self) -> TransferOutcome:
        """Moves the staged rows to the table, or copies all rows to it, and records the outcome."""
        await self._run("BEGIN")
        outcome = TransferOutcome(self._position.rows, self._position.rows)
        if self._lasting:
            await asyncio.to_thread(self._move, outcome)
        else:
            async for chunk in self._transfer.chunks():
                await self._insert(self._table, chunk)
                outcome.rows += chunk.rows
            if self._rows is None and self._options.mode is WriteMode.REPLACE:
                await asyncio.to_thread(self._empty)
            outcome.written = 0 if self._rows is None else self._rows.written
            if self._rows is not None:
                self._rows.compare()
                self._position.checksum = str(self._rows.take_checksum())
        if self._options.verify is not Verify.NONE and outcome.rows != outcome.written:
            raise ToolError(f"{outcome.rows} rows were read, and duckdb took {outcome.written}", kind="db")
        if self._options.verify is Verify.CHECKSUM and outcome.rows:
            outcome.checksum = self._position.checksum
        if self._rows is not None:
            outcome.drift = self._rows.drift.report()
        await self._record(await self._end(outcome), published=True)
        await self._run("COMMIT")
        return outcome

    def _move(self, outcome: TransferOutcome) -> None:
        connection, types = self._connection, self._types(self._stage)
        if types:
            connection.execute(LIKE.format(table=self._table, other=self._stage))
        own = self._types(self._table)
        added = {name: kind for name, kind in types.items() if name not in own}
        for name, kind in added.items():
            connection.execute(ADD_COLUMN.format(table=self._table, column=sql_identifier(name), type=kind))
        if added:
            outcome.drift = {"added": list(added)}
        if self._options.mode is WriteMode.REPLACE:
            self._empty()
        if self._position.columns:
            _delete_replaced(connection, self._table, self._stage, self._key)
            columns = listed(self._position.columns)
            move = INSERT.format(table=self._table, rows=self._stage, columns=columns)
            [(moved,)] = connection.execute(move).fetchall()
            if not self._key:  # of an upsert rows of one key are staged once
                outcome.written = int(moved)
        connection.execute(DROP.format(table=self._stage))

    def _empty(self) -> None:
        if self._types(self._table):
            self._connection.execute(EMPTY.format(table=self._table))

    async def discard(self) -> None:
        """Drops the stage of a transfer that was not published, when the end of the command is in the log."""
        try:
            async with self._alone():
                staged = await self._found()
                if staged is None or staged.ended >= self._call.number:
                    return
                await self._run(DROP.format(table=self._stage))
                await self._run(FORGET, *self._place)
        except duckdb.Error as error:
            raise ToolError(f"transfer: cannot clean {self._path}: {error}", kind="db") from None


class _Registered:
    """Shows a chunk to a connection as ``noetl_chunk``."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, chunk: TransferChunk) -> None:
        self._connection, self.rows = connection, arrow_table(chunk.data)

    def __enter__(self) -> Any:
        self._connection.register("noetl_chunk", self.rows)
        return self.rows

    def __exit__(self, *_: object) -> None:
        self._connection.unregister("noetl_chunk")


class _Rows:
    """Rows on their way into a table.

    Attributes:
        columns: those that were filled.
        written: the number of rows that the table took.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, table: str, key: Iterable[str], drift: Drift, *, checked: bool
    ) -> None:
        self._connection, self._table, self._key, self._checked = connection, table, tuple(key), checked
        self.drift = drift
        self.columns: dict[str, None] = {}
        self.written = 0
        self._read = self._kept = Checksum()

    def insert(self, chunk: TransferChunk) -> None:
        """Inserts a chunk."""
        connection, table = self._connection, self._table
        columns, new = self.drift.sort(chunk.columns, partial(duckdb_type, chunk))
        for name, type_name in new.items():
            connection.execute(ADD_COLUMN.format(table=table, column=sql_identifier(name), type=type_name))
        self.columns |= dict.fromkeys(columns)
        with _Registered(connection, chunk.only(columns)) as rows:
            _delete_replaced(connection, table, "noetl_chunk", self._key)
            insert = INSERT.format(table=table, rows="noetl_chunk", columns="*")
            if self._checked:
                inserted = connection.sql(f"{insert} RETURNING {listed(rows.column_names)}").to_arrow_table()
                count = len(inserted)
                stored, sent = as_read(inserted, rows, self._where)
                self._kept += sum_of_table(connection, stored)
                self._read += sum_of_table(connection, sent)
            else:
                [count] = connection.execute(insert).fetchone() or (0,)
        self.written += int(count)

    @property
    def _where(self) -> str:
        return f"duckdb table {self._table}"

    def compare(self) -> None:
        """Raises ``ToolError`` if the table does not keep the rows as they were read."""
        if self._checked:
            compare_checksums(self._read, self._kept, self._where, kind="db")

    def take_checksum(self) -> Checksum:
        """Returns the checksum of the rows since the last call."""
        checksum, self._read, self._kept = self._kept, Checksum(), Checksum()
        return checksum


def _delete_replaced(connection: duckdb.DuckDBPyConnection, table: str, rows: str, key: Iterable[str]) -> None:
    """Deletes the rows that have the key of new ones, if there is a key."""
    same = " AND ".join(f"{table}.{name} = new.{name}" for name in map(sql_identifier, key))
    if same:
        connection.execute(REPLACED.format(table=table, rows=rows, same=same))
