"""The formats of files of rows, and parsing of CSV and JSON lines. Errors name the file and the position.

Importing this module loads no Arrow.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.storage.exact_json import InexactNumberError, Numbers, loads_exact


class RowFormat(StrEnum):
    """A format of files of rows."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"


FORMAT_BY_ENDING = {f".{format}": format for format in RowFormat} | {".ndjson": RowFormat.JSONL}


def row_format(name: str | None, path: str) -> RowFormat:
    """Returns the format of a name, else of the path's ending; raises ``ToolError`` if neither determines it."""
    ending = f".{name}" if name else Path(path).suffix
    if (format := FORMAT_BY_ENDING.get(ending.lower())) is not None:
        return format
    formats = ", ".join(RowFormat)
    raise ToolError(f"no format for {name or path!r}; write format: one of {formats}", kind="schema")


BOM = b"\xef\xbb\xbf"
_EXCERPT = 80
# text without quotes, a value in quotes that ends with them, or a quote within an unquoted value
_QUOTED_WELL = re.compile(rb'(?:[^"]++|(?:\A|(?<=[,\r\n]))"[^"]*+(?:""[^"]*+)*+"(?=[,\r\n]|\Z)|(?<=[^,\r\n])")*+')
_QUOTED_THEN_BLANK = re.compile(rb'"[^"]*+(?:""[^"]*+)*+"[ \t]++(?=[,\r\n]|\Z)')


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """The name of the file that a block of bytes is from, and the position of its first byte."""

    name: str
    byte: int = 0

    def error(self, text: str, line: int | None = None) -> ToolError:
        """Returns an error in the block, with the line of the block if it is known, counted from 1."""
        after = f" after byte {self.byte}" if self.byte else ""
        place = f"from byte {self.byte} on" if line is None else f"line {line}{after}"
        return ToolError(f"{self.name}, {place}: {text}", kind="parse")

    def broken_quote(self, data: bytes) -> ToolError | None:
        """Returns the error for the first misplaced quote in a block of CSV; None when there is none."""
        if b'"' not in data:
            return None
        quoted = _QUOTED_WELL.match(data)
        assert quoted is not None  # it may be empty
        at = quoted.end()
        if at == len(data):
            return None
        place = f"at byte {self.byte + at}"
        if _QUOTED_THEN_BLANK.match(data, at):
            text = f"blanks follow the closing quote of the value {place}, where the comma or the line's end has to"
        else:
            text = f"the quote {place} opens a value that does not end with a quote before a comma or line"
        return self.error(f"{text}: {_excerpt(data[at:])}", data.count(b"\n", 0, at) + 1)


def csv_rows(
    data: bytes, columns: Sequence[str] | None, origin: BlockOrigin, encoding: str = "utf-8"
) -> tuple[list[str] | None, list[dict[str, str | None]]]:
    """Parses CSV; values are text, empty ones null.

    Args:
        columns: None if the first row names them.

    Returns:
        The columns, None if no row names them, and the rows without the :func:`unnamed_columns`.

    Raises:
        ToolError: it is no CSV, names a column twice, or has a row that does not fit the columns.
    """
    if (error := origin.broken_quote(data)) is not None:
        raise error
    names = None if columns is None else list(columns)
    try:
        text = data.removeprefix(BOM if origin.byte == 0 else b"").decode(encoding)
        reader = csv.reader(io.StringIO(text, newline=""))
        if names is None and (names := next(filter(None, reader), None)) is not None:
            check_columns(names, origin)
        unnamed = unnamed_columns(names or ())
        rows = []
        for values in reader:
            if len(values) == len(names or ()):
                rows.append(dict(zip(names or (), [value or None for value in values], strict=True)))
                if unnamed:
                    rows[-1].pop("")
                    _check_empty(values, unnamed, origin, reader.line_num)
            elif values:
                what = f"a CSV row has {len(values)} values for {len(names or ())} columns"
                raise origin.error(f"{what}: {SECRETS.beginning(repr(values), _EXCERPT)}", reader.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise origin.error(f"no CSV: {error}") from None
    return names, rows


def check_columns(names: Sequence[str], origin: BlockOrigin) -> None:
    """Raises ``ToolError`` if a column is named twice."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise origin.error(f"the header names column {twice!r} twice; rows could hold only one of them", 1)


def unnamed_columns(names: Sequence[str]) -> list[int]:
    """Returns the indexes of columns without a name if there are several, as from trailing commas: they stay empty."""
    return [n for n, name in enumerate(names) if not name] if names.count("") > 1 else []


def _check_empty(values: Sequence[str], unnamed: Sequence[int], origin: BlockOrigin, line: int) -> None:
    """Raises ``ToolError`` if an unnamed column has a value."""
    for n in unnamed:
        if values[n]:
            excerpt = SECRETS.beginning(repr(values[n]), _EXCERPT)
            what = f"{excerpt} stands in column {n + 1}, which the header does not name"
            raise origin.error(f"{what}; name it, or leave it empty", line)


def json_rows(lines: Sequence[bytes], origin: BlockOrigin, numbers: Numbers = Numbers.EXACT) -> list[Any]:
    """Parses JSON lines, and skips empty ones; raises ``ToolError`` if a line is no JSON, or has refused numbers."""
    filled = [stripped for line in lines if (stripped := line.strip())]
    with suppress(ValueError):
        rows: list[Any] = loads_exact(b"[%s]" % b",".join(filled), numbers)
        if len(rows) == len(filled):
            return rows
    rows = []
    for number, line in enumerate(lines, 1):
        if stripped := line.strip():
            try:
                rows.append(loads_exact(stripped, numbers))
            except InexactNumberError as error:
                raise origin.error(str(error), number) from None
            except ValueError as error:
                raise origin.error(f"no JSON ({error}): {_excerpt(stripped)}", number) from None
    return rows


def _excerpt(data: bytes) -> str:
    return SECRETS.beginning(data.decode(errors="replace"), _EXCERPT)
