"""Rows into a table of DuckDB."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import duckdb

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.sql_filters import sql_identifier
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.sql.tables import WriteMode, listed
from noetl_dagster.tools.transfer.checksum import Checksum, TableSums, as_read, compare_checksums
from noetl_dagster.tools.transfer.chunks import Chunk
from noetl_dagster.tools.transfer.drift import Drift, duckdb_type
from noetl_dagster.tools.transfer.options import Options, Verify
from noetl_dagster.tools.transfer.places import Place
from noetl_dagster.tools.transfer.postgres import Outcome


async def write_duckdb(
    place: Place, chunks: AsyncIterator[Chunk], options: Options, call: ToolCall
) -> Outcome:
    """Makes the table when it is missing, from the first chunk."""
    if place.database is None:
        raise ToolError("transfer: a duckdb target needs 'database', a file", kind="schema")
    if options.mode is WriteMode.UPSERT and not place.key:
        raise ToolError("transfer: upsert into duckdb needs 'key': its unique columns", kind="schema")
    connection = await asyncio.to_thread(duckdb.connect, str(Path(call.folder, place.database)))
    table: _DuckdbTable | None = None
    read = written = 0
    try:
        await asyncio.to_thread(connection.execute, "BEGIN")
        async for chunk in chunks:
            if table is None:
                table = await asyncio.to_thread(_DuckdbTable, connection, place, options, chunk)
            written += await asyncio.to_thread(table.insert, chunk)
            read += chunk.rows
        if table is not None and table.checked:
            compare_checksums(table.read, table.kept, table.where, kind="db")
        if options.verify is not Verify.NONE and read != written:
            raise ToolError(f"{read} rows were read, and duckdb took {written}", kind="db")
        await asyncio.to_thread(connection.execute, "COMMIT")
    finally:
        await asyncio.to_thread(connection.close)
    outcome = Outcome(read, written)
    if table is not None:
        outcome.drift = table.drift.report()
        outcome.checksum = str(table.kept) if table.checked else None
    return outcome


class _DuckdbTable:
    """A table of a file, which takes chunks.

    Attributes:
        read, kept: where ``checked``, the checksums of the chunks, and of what the table made of them.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, place: Place, options: Options, first: Chunk
    ) -> None:
        self._connection = connection
        self._table, self._key = sql_identifier(place.table), place.key
        connection.register("noetl_chunk", first.as_table())
        connection.execute(f"CREATE TABLE IF NOT EXISTS {self._table} AS SELECT * FROM noetl_chunk LIMIT 0")
        connection.unregister("noetl_chunk")
        if options.mode is WriteMode.REPLACE:
            connection.execute(f"DELETE FROM {self._table}")
        columns = [row[0] for row in connection.execute(f"DESCRIBE {self._table}").fetchall()]
        self.where = f"duckdb table {self._table}"
        self.drift = Drift(options.on_drift, self.where, columns)
        self.checked = options.verify is Verify.CHECKSUM
        self.read = self.kept = Checksum()
        self._sums = TableSums(connection)

    def insert(self, chunk: Chunk) -> int:
        """Takes a chunk, and says how many rows that were."""
        columns, new = self.drift.sort(chunk.columns, lambda name: duckdb_type(chunk, name))
        for name, type_name in new.items():
            self._connection.execute(
                f"ALTER TABLE {self._table} ADD COLUMN {sql_identifier(name)} {type_name}"
            )
        rows = chunk.only(columns).as_table()
        self._connection.register("noetl_chunk", rows)
        if self._key:
            names = map(sql_identifier, self._key)
            same = " AND ".join(f"{self._table}.{name} = noetl_chunk.{name}" for name in names)
            self._connection.execute(f"DELETE FROM {self._table} USING noetl_chunk WHERE {same}")
        insert = f"INSERT INTO {self._table} BY NAME SELECT * FROM noetl_chunk"
        if self.checked:
            kept = self._connection.sql(f"{insert} RETURNING {listed(rows.column_names)}").to_arrow_table()
            count = len(kept)
            stored, given = as_read(kept, rows, self.where)
            self.kept += self._sums.of(stored)
            self.read += self._sums.of(given)
        else:
            [count] = self._connection.execute(insert).fetchone() or (0,)
        self._connection.unregister("noetl_chunk")
        return int(count)
