"""Cuts rows of JSON lines, CSV and JSON arrays from bytes as they arrive, in pieces of whole records.

The bytes alone decide where a piece ends, however they arrive: a second reading cuts the same pieces.
"""

# Why a cutter of our own for arrays, and not ijson:
# - ijson takes up to twice as long as cutting and orjson together.
# - It parses numbers in another way than orjson, which parses a small body.
# - It does not report at which byte a value ends, so reading could not resume there.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact
from noetl_dagster.tools.rows import CHUNK_ROWS
from noetl_dagster.tools.rows.formats import BOM, BlockOrigin, RowFormat, csv_rows, json_rows

CUT_FORMATS = frozenset({RowFormat.JSONL, RowFormat.CSV, RowFormat.JSON})

RECORD_BYTES = 32 << 20  # of the longest record

ParseCsv = Callable[[bytes, Sequence[str] | None, BlockOrigin, str], tuple[list[str] | None, Any]]

_SPACE = b" \t\r\n"
_BLOCK = 1 << 20  # bytes of values that are parsed at a time
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_IN_VALUE = re.compile(rb'[^"\[\]{}]*+')
_IN_ARRAY = re.compile(rb'[^"\[\]{},]*+')


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file.

    Attributes:
        rows: a list of values, or the Arrow table of a ``parse_csv`` that makes one.
        offset: bytes from the beginning of the file to the end of the rows.
        full: False for the rows that are left at the end.
    """

    rows: Any
    offset: int
    full: bool = True


@dataclass(slots=True, eq=False)
class RowCutter:
    """Cuts one file of lines.

    Attributes:
        size: bytes after which a piece ends with the record; it also ends after ``CHUNK_ROWS`` lines.
        name: of the file, for errors.
        offset: position in the file of the first byte that is in no piece yet.
        columns: of CSV; None before the header.
        encoding: one that encodes line breaks, commas and quotes as ASCII does.
        longest: bytes that a record may have.
        parse_csv: parses a block of CSV; see :func:`csv_rows`.
        numbers: the answer to JSON numbers that would change.
    """

    format: RowFormat
    size: int
    name: str
    offset: int = 0
    columns: list[str] | None = None
    encoding: str = "utf-8"
    longest: int = RECORD_BYTES
    parse_csv: ParseCsv = csv_rows
    numbers: Numbers = Numbers.EXACT
    _rest: bytearray = field(default_factory=bytearray)  # the bytes of the piece that has not ended
    _at: int = 0  # how many of them have been searched
    _lines: int = 0  # that end among the searched bytes
    _quoted: bool = False  # the searched bytes end inside of quotes

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Takes further bytes and yields the pieces that end in them; raises ``ToolError`` if they cannot be parsed."""
        self._rest += data
        while (end := self._piece_end()) is not None:
            piece = self._piece(end, full=True)
            if len(piece.rows):
                yield piece
        if len(self._rest) > self.longest:
            rest = bytes(self._rest)
            begin = last_record_end(rest) if self.format is RowFormat.CSV else rest.rfind(b"\n") + 1
            if len(rest) - begin > self.longest:
                error = BlockOrigin(self.name, self.offset).broken_quote(rest)
                too_long = f"a record of more than {self.longest} bytes"
                raise error or BlockOrigin(self.name, self.offset + begin).error(too_long)

    def end(self) -> Piece | None:
        """Returns the rows that are left; None if there are none."""
        piece = self._piece(len(self._rest), full=False)
        return piece if len(piece.rows) else None

    def _piece_end(self) -> int | None:
        """Returns the end of the first record that fills the piece; None while it has not arrived."""
        rest = self._rest
        skipped = min(self.size - 1, len(rest))  # no piece ends before because of its size
        if skipped > self._at:
            lines = rest.count(b"\n", self._at, skipped)
            if self._lines + lines < CHUNK_ROWS:
                self._count(skipped, lines)
        while (line_end := rest.find(b"\n", self._at)) >= 0:
            self._count(line_end + 1, 1)
            if not self._quoted and (self._at >= self.size or self._lines >= CHUNK_ROWS):
                return self._at
        return None

    def _count(self, to: int, lines: int) -> None:
        if self.format is RowFormat.CSV:
            self._quoted ^= self._rest.count(b'"', self._at, to) % 2 == 1
        self._at, self._lines = to, self._lines + lines

    def _piece(self, end: int, *, full: bool) -> Piece:
        with memoryview(self._rest) as view:
            block = bytes(view[:end])
        del self._rest[:end]
        origin = BlockOrigin(self.name, self.offset)
        self.offset += end
        self._at, self._lines, self._quoted = 0, 0, False
        if self.format is RowFormat.CSV:
            self.columns, rows = self.parse_csv(block, self.columns, origin, self.encoding)
        else:
            lines = block.removeprefix(BOM) if origin.byte == 0 else block
            rows = json_rows(lines.split(b"\n"), origin, self.numbers)
        return Piece(rows, self.offset, full)


def last_record_end(block: bytes) -> int:
    """Returns the position after the last line end of CSV that is outside of quotes; 0 when there is none."""
    quoted = block.count(b'"') % 2
    end = len(block)
    while end > 0:
        line_end = block.rfind(b"\n", 0, end)
        quoted ^= block.count(b'"', max(line_end, 0), end) % 2
        if line_end >= 0 and not quoted:
            return line_end + 1
        end = line_end
    return 0


def begins_array(beginning: bytes) -> bool:
    """Returns whether a file with this beginning can be a JSON array."""
    return beginning.removeprefix(BOM).lstrip(_SPACE).startswith(b"[")


def ends_value(beginning: bytes) -> bool:
    """Returns whether a comma follows the first value of an array; raises ``ToolError`` if it is no JSON."""
    return next(ArrayCutter(1, name="the body").feed(beginning[:RECORD_BYTES]), None) is not None


@dataclass(slots=True, eq=False)
class ArrayCutter:
    """Cuts one array at its own commas.

    orjson parses the pieces: if each is JSON, then all of it is, and the brackets were counted correctly.

    Attributes:
        size: bytes after which a piece ends with the value; it also ends after about ``CHUNK_ROWS`` values.
        name: of the file, for errors.
        offset: position in the file of the first byte that is not parsed yet.
        longest: bytes that a value may have, if they are more than ``RECORD_BYTES``.
        numbers: the answer to numbers that would change.
    """

    columns = None

    size: int
    name: str
    offset: int = 0
    longest: int = RECORD_BYTES
    numbers: Numbers = Numbers.EXACT
    _rows: list[Any] = field(default_factory=list)  # those of the piece that has not ended
    _bytes: int = 0
    _rest: bytearray = field(default_factory=bytearray)  # the bytes after the offset
    _at: int = 0  # how many of them have been searched
    _depth: int = 0  # of brackets there
    _quoted: bool = False
    _block: int = _BLOCK

    def __post_init__(self) -> None:
        self.longest = max(self.longest, RECORD_BYTES)
        self._depth = 1 if self.offset else 0
        self._block = min(self.size, _BLOCK)

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Takes further bytes and yields the pieces that end in them; raises ``ToolError`` if they cannot be parsed."""
        self._rest += data
        while (comma := self._comma()) is not None:
            rows = self._parsed(bytes(self._rest[:comma]) + b"]")
            if not rows:
                raise self._not_json("a value is missing before a comma")
            del self._rest[: comma + 1]
            self._at = 0
            self.offset += comma + 1
            self._rows += rows
            self._bytes += comma + 1
            if self._bytes >= self.size or len(self._rows) >= CHUNK_ROWS:
                yield self._piece(full=True)
        if len(self._rest) > self._block + self.longest:
            raise BlockOrigin(self.name, self.offset).error(
                f"a value of more than {self.longest} bytes is in the JSON array; is there a quote or bracket that is "
                "never closed?"
            )

    def end(self) -> Piece | None:
        """Returns the rows that are left, if any; raises ``ToolError`` if the array does not end here."""
        rows = self._parsed(bytes(self._rest))
        if not rows and self.offset:
            raise self._not_json("a value is missing after a comma")
        self._rows += rows
        self.offset += len(self._rest)
        self._rest.clear()
        return self._piece(full=False) if self._rows else None

    def _piece(self, *, full: bool) -> Piece:
        rows, self._rows, self._bytes = self._rows, [], 0
        return Piece(rows, self.offset, full)

    def _comma(self) -> int | None:
        """Returns the position of the first comma between values after a block; None while it has not arrived."""
        self._skip(min(self._block, len(self._rest)))
        rest = self._rest
        while self._at < len(rest):
            pattern = _IN_STRING if self._quoted else _IN_ARRAY if self._depth == 1 else _IN_VALUE
            match = pattern.match(rest, self._at)
            assert match is not None  # it may be empty
            self._at = match.end()
            mark = bytes(rest[self._at : self._at + 1])
            if mark in (b"", b"\\"):  # the rest of a string that ends in half an escape has not arrived
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
        """Counts quotes and brackets up to a position, many at a time."""
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
            rows = loads_exact(b"[" + text if self.offset else text.removeprefix(BOM), self.numbers)
        except InexactNumberError as error:
            raise BlockOrigin(self.name, self.offset).error(str(error)) from None
        except ValueError as error:
            raise self._not_json(str(error)) from None
        if not isinstance(rows, list):
            raise self._not_json("it is another value")
        return rows

    def _not_json(self, why: str) -> ToolError:
        return BlockOrigin(self.name, self.offset).error(f"no JSON array: {why}")


def cutter_for(
    format: RowFormat,
    size: int,
    position: Mapping[str, Any],
    name: str,
    encoding: str = "utf-8",
    longest: int = RECORD_BYTES,
    parse_csv: ParseCsv = csv_rows,
    numbers: Numbers = Numbers.EXACT,
) -> RowCutter | ArrayCutter:
    """Returns the cutter for a file of a format.

    Args:
        position: empty at the beginning of the file, else the ``offset`` and ``columns`` after an earlier piece.
    """
    offset, columns = position.get("offset", 0), position.get("columns")
    if format is RowFormat.JSON:
        return ArrayCutter(size, name, offset, longest, numbers)
    return RowCutter(format, size, name, offset, columns, encoding, longest, parse_csv, numbers)
