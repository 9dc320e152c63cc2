"""Gathers rows that arrive a few at a time into chunks.

Imports little, so that the subprocess of ``isolation: subprocess`` starts fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from noetl_dagster.tools.rows import CHUNK_ROWS

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows of one chunk.

    Attributes:
        rows: a list, or an Arrow table.
        position: of the source after them.
        full: they have the size of a chunk; False for the rows that are left at the end.
    """

    rows: list[Any] | pa.Table
    position: Any = None
    full: bool = True


class Gathering:
    """Gathers rows into chunks; lists and tables never share one.

    Args:
        chunk_bytes: size of a chunk, as JSON or in Arrow; ``CHUNK_ROWS`` rows are a chunk too. With 0 the rows of every
            call of ``add`` are one.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._rows: list[Any] = []
        self._tables: list[pa.Table] = []
        self._bytes = self._count = 0
        self._position: Any = None

    def add(self, rows: list[Any] | pa.Table, position: Any = None) -> Iterator[Gathered]:
        """Takes rows, JSON values or an Arrow table; yields the chunks that are full with them."""
        if len(rows) == 0:
            return
        if not self._joins(rows):
            yield self._taken(full=True)
        if isinstance(rows, list):
            self._rows += rows
            self._bytes += len(orjson.dumps(rows)) if self._chunk_bytes else 0
        else:
            self._tables.append(rows)
            self._bytes += rows.nbytes
        self._count += len(rows)
        self._position = position
        if self._bytes >= self._chunk_bytes or self._count >= CHUNK_ROWS:
            yield self._taken(full=True)

    def rest(self) -> Gathered | None:
        """Returns the rows that are left at the end; None when every row is in a chunk."""
        return self._taken(full=False) if self._rows or self._tables else None

    def _joins(self, rows: list[Any] | pa.Table) -> bool:
        """Returns whether rows can share the chunk that is being gathered."""
        if isinstance(rows, list):
            return not self._tables
        return not self._rows and all(table.schema == rows.schema for table in self._tables[:1])

    def _taken(self, *, full: bool) -> Gathered:
        rows: list[Any] | pa.Table = self._rows
        if self._tables:
            import pyarrow as pa

            rows = pa.concat_tables(self._tables)
        taken = Gathered(rows, self._position, full)
        self._rows, self._tables, self._bytes, self._count = [], [], 0, 0
        return taken
