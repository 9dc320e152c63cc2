"""Rows of JSON lines and CSV from bytes as they come, in pieces of whole records.

Where a piece ends is a matter of the bytes alone, not of how they come: who reads them again gets the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from noetl_dagster.tools.rows.formats import CHUNK_ROWS, RowFormat
from noetl_dagster.tools.rows.parsing import BOM, Where, csv_rows, json_rows

CUT_FORMATS = frozenset({RowFormat.JSONL, RowFormat.CSV, RowFormat.JSON})

RECORD_BYTES = 32 << 20
"""The longest record."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file.

    Attributes:
        offset: bytes from the beginning of the file to the end of them.
    """

    rows: list[Any]
    offset: int


class RowCutter:
    """Cuts one file of lines. CSV values are text, empty ones null.

    Args:
        size: bytes from which on whole records are a piece; ``CHUNK_ROWS`` of them are one too.
        name: what errors call the file.
        offset: where in the file the bytes begin that come; the end of an earlier piece.
        columns: of CSV whose bytes do not begin with their names.
        encoding: one in which line breaks, commas and quotes are those of ASCII.
    """

    def __init__(
        self,
        format: RowFormat,
        size: int,
        *,
        name: str,
        offset: int = 0,
        columns: Sequence[str] | None = None,
        encoding: str = "utf-8",
    ) -> None:
        self._csv = format is RowFormat.CSV
        self._size = size
        self._name = name
        self._encoding = encoding
        self._offset = offset
        self._rest = bytearray()  # of a record that has not ended
        self._records: list[bytes] = []
        self._bytes = 0
        self.columns = None if columns is None else list(columns)

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Takes further bytes; gives the pieces that are full with them.

        Raises:
            ToolError: what came is not of the format.
        """
        self._rest += data
        if len(self._rest) > RECORD_BYTES:
            where = Where(self._name, self._offset + self._bytes)
            raise where.never_ends(RECORD_BYTES, bytes(self._rest))
        if b"\n" not in data:
            return
        lines = bytes(self._rest).split(b"\n")
        begun: list[bytes] = []  # lines of a record whose quotes are still open
        quotes = 0
        for line in lines[:-1]:
            begun.append(line)
            quotes += line.count(b'"') if self._csv else 0
            if quotes % 2:
                continue
            self._records.append(b"\n".join(begun) + b"\n")
            self._bytes += len(self._records[-1])
            begun, quotes = [], 0
            full = self._bytes >= self._size or len(self._records) >= CHUNK_ROWS
            if full and (piece := self._piece()).rows:
                yield piece
        self._rest = bytearray(b"\n".join((*begun, lines[-1])))

    def end(self) -> Piece | None:
        """The rows that are left; None where there are none."""
        if self._rest:
            self._records.append(bytes(self._rest))
            self._bytes += len(self._rest)
            self._rest = bytearray()
        piece = self._piece()
        return piece if piece.rows else None

    def _piece(self) -> Piece:
        records, self._records = self._records, []
        where = Where(self._name, self._offset)
        self._offset, self._bytes = self._offset + self._bytes, 0
        if self._csv:
            self.columns, rows = csv_rows(b"".join(records), self.columns, where, self._encoding)
            return Piece(rows, self._offset)
        if where.byte == 0 and records:
            records[0] = records[0].removeprefix(BOM)
        return Piece(json_rows(records, where), self._offset)
