"""Rows of JSON lines and CSV from bytes as they come, in pieces of whole records.

Where a piece ends is a matter of the bytes alone, not of how they come: who reads them again gets the same pieces.
"""

# Why a cutter of our own, and not ijson:
# - ijson takes up to twice as long as cutting and orjson together.
# - Its numbers are others than orjson's, which a small body has.
# - It does not say at which byte a value ends, so that nothing could go on there.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from noetl_dagster.errors import ToolError
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


_SPACE = b" \t\r\n"
_BLOCK = 1 << 20  # bytes that are values at a time
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_IN_VALUE = re.compile(rb'[^"\[\]{}]*+')
_IN_ARRAY = re.compile(rb'[^"\[\]{},]*+')


def begins_array(beginning: bytes) -> bool:
    """Whether a file that begins so can be a JSON array."""
    return beginning.removeprefix(BOM).lstrip(_SPACE).startswith(b"[")


def ends_value(beginning: bytes) -> bool:
    """Whether a comma follows the first value of an array.

    Raises:
        ToolError: it is no JSON.
    """
    return next(ArrayCutter(1, name="the body").feed(beginning[:RECORD_BYTES]), None) is not None


class ArrayCutter:
    """Cuts one array at commas of its own. orjson reads the pieces: that each is JSON proves that all of it is, and
    that no bracket was counted wrongly.

    Args:
        size: bytes from which on whole values are a piece; some more than ``CHUNK_ROWS`` of them are one too.
        name: what errors call the file.
        offset: where in the file the bytes begin that come; the end of an earlier piece.
        longest: bytes that a value may have.
    """

    columns = None

    def __init__(self, size: int, *, name: str, offset: int = 0, longest: int = RECORD_BYTES) -> None:
        self._longest = max(longest, RECORD_BYTES)
        self._size = size
        self._block = min(size, _BLOCK)
        self._rows: list[Any] = []  # those of the piece that is being made, which end at the offset
        self._bytes = 0
        self._name = name
        self._offset = offset
        self._rest = bytearray()  # what follows the offset
        self._at = 0  # how far it has been looked at
        self._depth = 1 if offset else 0  # of brackets there
        self._quoted = False

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Takes further bytes; gives the pieces that are full with them.

        Raises:
            ToolError: what came is no JSON array.
        """
        self._rest += data
        while (comma := self._comma()) is not None:
            rows = self._parsed(bytes(self._rest[:comma]) + b"]")
            if not rows:
                raise self._not_json("a value is missing before a comma")
            del self._rest[: comma + 1]
            self._at = 0
            self._offset += comma + 1
            self._rows += rows
            self._bytes += comma + 1
            if self._bytes >= self._size or len(self._rows) >= CHUNK_ROWS:
                yield self._piece()
        if len(self._rest) > self._block + self._longest:
            raise Where(self._name, self._offset).error(
                f"a value of more than {self._longest} bytes is in the JSON array; is there a quote or bracket that is "
                "never closed?"
            )

    def end(self) -> Piece | None:
        """The rows that are left; None where there are none.

        Raises:
            ToolError: the array does not end here, or has ended before.
        """
        rows = self._parsed(bytes(self._rest))
        if not rows and self._offset:
            raise self._not_json("a value is missing after a comma")
        self._rows += rows
        self._offset += len(self._rest)
        self._rest.clear()
        return self._piece() if self._rows else None

    def _piece(self) -> Piece:
        rows, self._rows, self._bytes = self._rows, [], 0
        return Piece(rows, self._offset)

    def _comma(self) -> int | None:
        """Where the first comma between values stands from the block's size on; None where it has not come."""
        self._skip(min(self._block, len(self._rest)))
        rest = self._rest
        while self._at < len(rest):
            pattern = _IN_STRING if self._quoted else _IN_ARRAY if self._depth == 1 else _IN_VALUE
            found = pattern.match(rest, self._at)
            assert found is not None  # it may be empty
            self._at = found.end()
            mark = bytes(rest[self._at : self._at + 1])
            if mark in (b"", b"\\"):  # a string that ends in half an escape has not all come
                break
            if mark == b"," and self._at >= self._block:
                return self._at
            self._at += 1
            if mark == b'"':
                self._quoted = not self._quoted
            elif mark != b",":
                self._depth += 1 if mark in b"[{" else -1
        return None

    def _skip(self, to: int) -> None:
        """Counts quotes and brackets up to a place, many at a time."""
        block = bytes(self._rest[self._at : to]).rstrip(b"\\")
        self._at += len(block)
        if b"\\" in block:
            block = _ESCAPED.sub(b"", block)
        texts = block.translate(None, _NO_MARKS).split(b'"')
        outside = b"".join(texts[self._quoted :: 2])
        self._quoted ^= len(texts) % 2 == 0
        self._depth += sum(map(outside.count, (b"[", b"{"))) - sum(map(outside.count, (b"]", b"}")))

    def _parsed(self, text: bytes) -> list[Any]:
        try:
            rows = orjson.loads(b"[" + text if self._offset else text.removeprefix(BOM))
        except orjson.JSONDecodeError as error:
            raise self._not_json(str(error)) from None
        if not isinstance(rows, list):
            raise self._not_json("it is another value")
        return rows

    def _not_json(self, why: str) -> ToolError:
        return Where(self._name, self._offset).error(f"no JSON array: {why}")


def cutter_for(
    format: RowFormat,
    size: int,
    position: dict[str, Any],
    name: str,
    encoding: str = "utf-8",
    longest: int = RECORD_BYTES,
) -> RowCutter | ArrayCutter:
    """What cuts a file of a format, from the beginning or from a position with its ``offset`` and ``columns``.

    Args:
        longest: bytes that a value of an array may have.
    """
    offset, columns = position.get("offset", 0), position.get("columns")
    if format is RowFormat.JSON:
        return ArrayCutter(size, name=name, offset=offset, longest=longest)
    return RowCutter(format, size, name=name, offset=offset, columns=columns, encoding=encoding)
