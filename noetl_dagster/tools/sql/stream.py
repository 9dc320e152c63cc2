"""Large results of postgres: from a cursor into a Parquet result, one chunk in memory at a time."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.storage.codec import PARQUET
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.rows.files import row_writer
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.scripts import sql_text
from noetl_dagster.tools.sql.cursor import read_rows
from noetl_dagster.tools.sql.percent import without_percent
from noetl_dagster.tools.sql.statements import bind, split_statements

FILE_CHUNK = 4 * 1024 * 1024


async def stream_rows(call: ToolCall, box: Toolbox, size: int) -> ResultRef:
    """Runs the call's one statement through a cursor and stores its rows as Parquet.

    Args:
        size: rows in memory at a time.

    Returns:
        The reference; ``extra["rows"]`` is the number of rows.

    Raises:
        ToolError: for more than one statement, and for whatever the server refuses.
    """
    statements = [item for text in await sql_text(call, box) for item in split_statements(text)]
    if len(statements) != 1:
        raise ToolError(
            f"postgres in step {call.step}: chunk_size streams the rows of one statement, "
            f"'command' has {len(statements)}",
            kind="schema",
        )
    params = call.config.get("params") or call.input
    statement = bind(without_percent(statements, params)[0], params)
    with tempfile.TemporaryDirectory(prefix="noetl-rows-") as folder:
        path, count = Path(folder, "rows.parquet"), 0
        writer = row_writer(path, RowFormat.PARQUET)
        with contextlib.closing(writer):
            async with aclosing(cast(Any, read_rows(statement, call, box, size))) as chunks:
                async for rows in chunks:
                    await asyncio.to_thread(writer.write, rows)
                    count += len(rows)
                    box.progress(call, f"{count} rows read")
        try:
            return await box.results.put_stream(
                _file_chunks(path),
                execution_id=call.execution_id,
                step=call.step,
                name=call.task.name,
                spec=call.task.spec.result,
                content_type=PARQUET,
                extra={"rows": count},
            )
        except StorageError as error:
            raise ToolError(
                f"postgres in step {call.step}: {error}", kind=error.kind, retryable=True
            ) from None


async def _file_chunks(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    with file:
        while chunk := await asyncio.to_thread(file.read, FILE_CHUNK):
            yield chunk
