"""DuckDB as a source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.reader import threaded
from noetl_dagster.tools.sql.tables import listed
from noetl_dagster.tools.transfer.chunks import TransferChunk, TransferSource
from noetl_dagster.tools.transfer.options import TransferEnd


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
