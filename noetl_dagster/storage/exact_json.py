"""Parses JSON so that no number changes: one that neither a 64-bit integer nor a double holds is refused, or text."""

from __future__ import annotations

import json
from decimal import Decimal
from enum import StrEnum
from typing import Any

import orjson

from noetl_dagster.values import INTEGER_BOUND

_LONG = b"0" * 17
"""Digits with their point, from which on a number can have more than the 15 that every double holds."""

_DIGITS = bytes(ord("0") if byte in b".0123456789" else ord(" ") for byte in range(256))
_SPACE = b" \t\r\n"


class Numbers(StrEnum):
    """The answer to a JSON number that neither a 64-bit integer nor a double holds."""

    EXACT = "exact"  # it is refused
    FLOAT = "float"  # it becomes the nearest double
    TEXT = "text"  # it becomes text with all its digits


class InexactNumberError(ValueError):
    """A JSON text has a number that would change; the message names its place."""


def loads_exact(text: bytes | str, numbers: Numbers = Numbers.EXACT) -> Any:
    """Parses JSON. Of an object's equal keys, the last counts.

    orjson parses the text. Only if it has long numbers that orjson would write in another way, the parser of the
    standard library, which is slower, examines each of its numbers.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
        InexactNumberError: a number would change, and ``numbers`` does not allow it.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        value = orjson.loads(data)
        if numbers is Numbers.FLOAT or not _has_long_numbers(data) or _is_written_alike(value, data):
            return value
    except orjson.JSONDecodeError as error:
        if "infinity" not in str(error):  # a number that no double holds
            raise
    reader = _NumberReader(numbers)
    value = json.loads(data, parse_int=reader.integer, parse_float=reader.decimal, parse_constant=reader.note)
    if reader.inexact and numbers is not Numbers.TEXT:
        raise InexactNumberError(
            f"value{_place_of_inexact(value)} is {reader.inexact[0]:.50}, which neither a 64-bit integer nor a double "
            "holds; write numbers: text for its digits as text, or numbers: float for the nearest double"
        )
    return value


def _has_long_numbers(data: bytes) -> bool:
    """Reports whether a text can have a number that changes. Exponents up to -99 never make it 0."""
    return _LONG in data.translate(_DIGITS) or b"e-" in data or b"E-" in data


def _is_written_alike(value: Any, data: bytes) -> bool:
    return orjson.dumps(value).translate(None, _SPACE) == data.translate(None, _SPACE)


class _Inexact(str):
    """A number that would change."""


class _NumberReader:
    """Reads the numbers of one text, and notes those that would change."""

    def __init__(self, numbers: Numbers) -> None:
        self._type = str if numbers is Numbers.TEXT else _Inexact
        self.inexact: list[str] = []

    def integer(self, literal: str) -> Any:
        """Returns an integer of 64 bits, the double that has the literal's digits, else the literal."""
        if len(literal) < len(str(INTEGER_BOUND)) or -INTEGER_BOUND <= int(literal) < 2 * INTEGER_BOUND:
            return int(literal)
        near = float(literal)  # jsonb writes 1e20 with all its zeros
        return near if Decimal(repr(near)) == int(literal) else self.note(literal)

    def decimal(self, literal: str) -> Any:
        """Returns the double that has the literal's digits, else the literal.

        Programs write doubles with up to 17 digits or more (``0.10000000000000001``). These digits are the double's.
        """
        near = float(literal)
        if repr(near) == literal:
            return near
        exact = Decimal(literal)
        digits = len("".join(map(str, exact.as_tuple().digits)).strip("0")) or 1
        return near if Decimal(f"{near:.{digits - 1}e}") == exact else self.note(literal)

    def note(self, literal: str) -> str:
        """Notes a number that would change, or one that JSON does not have."""
        self.inexact.append(literal)
        return self._type(literal)


def _place_of_inexact(value: Any) -> str | None:
    """Returns the path to the first number that would change."""
    if isinstance(value, _Inexact):
        return ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if (place := _place_of_inexact(item)) is not None:
            return (f"[{key}]" if isinstance(value, list) else f".{key}") + place
    return None
