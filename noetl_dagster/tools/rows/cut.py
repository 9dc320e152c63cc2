"""Rows of JSON lines and CSV from bytes as they come, in pieces of whole records.

Where a piece ends is a matter of the bytes alone, not of how they come: who reads them again gets the same pieces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import orjson

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.rows.formats import RowFormat

CUT_FORMATS = frozenset({RowFormat.JSONL, RowFormat.CSV, RowFormat.JSON})

RECORD_BYTES = 32 << 20
"""The longest record."""

_BOM = b"\xef\xbb\xbf"
_EXCERPT = 80


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
        size: bytes from which on whole records are a piece.
        offset: where in the file the bytes begin that come; the end of an earlier piece.
        columns: of CSV whose bytes do not begin with their names.
        encoding: one in which line breaks, commas and quotes are those of ASCII.
    """

    def __init__(
        self,
        format: RowFormat,
        size: int,
        *,
        offset: int = 0,
        columns: Sequence[str] | None = None,
        encoding: str = "utf-8",
    ) -> None:
        self._csv = format is RowFormat.CSV
        self._size = size
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
            raise ToolError(
                f"a record of more than {RECORD_BYTES} bytes begins after byte {self._offset}; "
                "is there a quote that is never closed?",
                kind="parse",
            )
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
            if self._bytes >= self._size and (piece := self._piece()).rows:
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
        start, self._offset, self._bytes = self._offset, self._offset + self._bytes, 0
        if start == 0 and records:
            records[0] = records[0].removeprefix(_BOM)
        rows = self._parsed_csv(records, start) if self._csv else _parsed_lines(records, start)
        return Piece(rows, self._offset)

    def _parsed_csv(self, records: list[bytes], start: int) -> list[dict[str, str | None]]:
        try:
            text = io.StringIO(b"".join(records).decode(self._encoding), newline="")
            parsed = [values for values in csv.reader(text) if values]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ToolError(f"no CSV from byte {start} on: {error}", kind="parse") from None
        if self.columns is None and parsed:
            self.columns = parsed.pop(0)
        return [self._row(values) for values in parsed]

    def _row(self, values: list[str]) -> dict[str, str | None]:
        names = self.columns or []
        if len(values) > len(names):
            raise ToolError(
                f"a CSV row has {len(values)} values for {len(names)} columns: {values!r:.{_EXCERPT}}",
                kind="parse",
            )
        return dict(zip_longest(names, [value or None for value in values]))


def _parsed_lines(records: list[bytes], start: int) -> list[Any]:
    lines = [line for record in records if (line := record.strip())]
    with suppress(orjson.JSONDecodeError):
        rows: list[Any] = orjson.loads(b"[%s]" % b",".join(lines))
        if len(rows) == len(lines):
            return rows
    return [_parsed_line(line, start) for line in lines]


def _parsed_line(line: bytes, start: int) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        excerpt = line[:_EXCERPT].decode(errors="replace")
        raise ToolError(f"a line after byte {start} is no JSON ({error}): {excerpt}", kind="parse") from None
