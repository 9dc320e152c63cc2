"""DuckDB as a source and a target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.rows.files import arrow_table
from noetl_dagster.tools.rows.reader import threaded
from noetl_dagster.tools.sql.tables import WriteMode, listed
from noetl_dagster.tools.transfer.checksum import Checksum, as_read, compare_checksums, sum_of_table
from noetl_dagster.tools.transfer.chunks import (
    Drift,
    Transfer,
    TransferChunk,
    TransferOutcome,
    TransferSource,
    duckdb_type,
)
from noetl_dagster.tools.transfer.options import TransferEnd, TransferOptions, Verify


async def write_duckdb(transfer: Transfer) -> TransferOutcome:
    """Writes all rows in one transaction; creates a missing table with the columns of the first chunk."""
    target, options = transfer.target, transfer.options
    if target.database is None:
        raise ToolError("transfer: a duckdb target needs 'database', a file", kind="schema")
    if options.mode is WriteMode.UPSERT and not target.key:
        raise ToolError("transfer: upsert into duckdb needs 'key': its unique columns", kind="schema")
    connection = await asyncio.to_thread(duckdb.connect, str(Path(transfer.call.folder, target.database)))
    table: _DuckdbTable | None = None
    outcome = TransferOutcome(0, 0)
    try:
        await asyncio.to_thread(connection.execute, "BEGIN")
        async for chunk in transfer.chunks():
            if table is None:
                table = await asyncio.to_thread(_DuckdbTable, connection, target, options, chunk)
            outcome.written += await asyncio.to_thread(table.insert, chunk)
            outcome.rows += chunk.rows
        if table is not None:
            outcome.drift = table.drift.report()
            if options.verify is Verify.CHECKSUM:
                compare_checksums(table.read, table.kept, table.where, kind="db")
                outcome.checksum = str(table.kept)
        if options.verify is not Verify.NONE and outcome.rows != outcome.written:
            raise ToolError(f"{outcome.rows} rows were read, and duckdb took {outcome.written}", kind="db")
        await asyncio.to_thread(connection.execute, "COMMIT")
    finally:
        await asyncio.to_thread(connection.close)
    return outcome


class _DuckdbTable:
    """A table of a file.

    Attributes:
        read, kept: if checksums are to be verified, those of the chunks, and of their rows in the table.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        target: TransferEnd,
        options: TransferOptions,
        first: TransferChunk,
    ) -> None:
        self._connection = connection
        self._table, self._key = sql_identifier(target.table), target.key
        connection.register("noetl_chunk", arrow_table(first.data))
        connection.execute(f"CREATE TABLE IF NOT EXISTS {self._table} AS SELECT * FROM noetl_chunk LIMIT 0")
        connection.unregister("noetl_chunk")
        if options.mode is WriteMode.REPLACE:
            connection.execute(f"DELETE FROM {self._table}")
        columns = [row[0] for row in connection.execute(f"DESCRIBE {self._table}").fetchall()]
        self.where = f"duckdb table {self._table}"
        self.drift = Drift(options.on_drift, self.where, columns)
        self._checked = options.verify is Verify.CHECKSUM
        self.read = self.kept = Checksum()

    def insert(self, chunk: TransferChunk) -> int:
        """Inserts a chunk; returns the number of rows that the table took."""
        connection, table = self._connection, self._table
        columns, new = self.drift.sort(chunk.columns, partial(duckdb_type, chunk))
        for name, type_name in new.items():
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {sql_identifier(name)} {type_name}")
        rows = arrow_table(chunk.only(columns).data)
        connection.register("noetl_chunk", rows)
        if self._key:
            names = map(sql_identifier, self._key)
            same = " AND ".join(f"{table}.{name} = noetl_chunk.{name}" for name in names)
            connection.execute(f"DELETE FROM {table} USING noetl_chunk WHERE {same}")
        insert = f"INSERT INTO {table} BY NAME SELECT * FROM noetl_chunk"
        if self._checked:
            kept = connection.sql(f"{insert} RETURNING {listed(rows.column_names)}").to_arrow_table()
            count = len(kept)
            stored, given = as_read(kept, rows, self.where)
            self.kept += sum_of_table(connection, stored)
            self.read += sum_of_table(connection, given)
        else:
            [count] = connection.execute(insert).fetchone() or (0,)
        connection.unregister("noetl_chunk")
        return int(count)


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
        async for batch in threaded(await asyncio.to_thread(relation.to_arrow_reader, self._size)):
            done += batch.num_rows
            if batch.num_rows:
                yield TransferChunk(pa.Table.from_batches([batch]), done if self.seeks else None)
