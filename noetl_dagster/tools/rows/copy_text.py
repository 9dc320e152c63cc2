"""Rows in the text format of PostgreSQL's COPY, where the server turns text into its column types."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson

from noetl_dagster.tools.rows.jsonable import to_jsonable
from noetl_dagster.tools.rows.values import parameter, row_value

NULL = "\\N"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f"})


def copy_lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], types: Mapping[str, str]) -> bytes:
    """The rows as lines of COPY; a column that a row lacks is null.

    Args:
        types: column to type name as ``pg_type.typname`` says it (arrays begin with ``_``).
    """
    lines = (
        "\t".join(
            NULL if (value := row.get(name)) is None else _field(value, types[name]) for name in columns
        )
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _field(value: Any, type_name: str) -> str:
    if isinstance(value, str) and type_name not in ("json", "jsonb", "bytea"):
        return value.replace("\0", "").translate(_ESCAPES)
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int | float | Decimal | UUID):
        return str(value)
    return _text(value, type_name).replace("\0", "").translate(_ESCAPES)


def _text(value: Any, type_name: str) -> str:
    if type_name in ("json", "jsonb"):
        return orjson.dumps(parameter(row_value(value), type_name)).decode()
    if isinstance(value, bytes | bytearray | memoryview):
        return f"\\x{bytes(value).hex()}"
    if type_name == "bytea":
        return f"\\x{_from_base64(value).hex()}"
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return f"{value.total_seconds()} seconds"
    if isinstance(value, list | tuple) and type_name.startswith("_"):
        return _array(value, type_name[1:])
    plain = row_value(value)
    return plain if isinstance(plain, str) else orjson.dumps(to_jsonable(plain)).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return text.encode()


def _array(values: Sequence[Any], element: str) -> str:
    """An array literal: ``{"a",NULL,{...}}``."""
    parts = []
    for value in values:
        if value is None:
            parts.append("NULL")
        elif isinstance(value, list | tuple) and element not in ("json", "jsonb"):
            parts.append(_array(value, element))
        else:
            text = (
                value
                if isinstance(value, str) and element not in ("json", "jsonb")
                else _element(value, element)
            )
            escaped = text.replace("\\", "\\\\").replace('"', '\\"')
            parts.append(f'"{escaped}"')
    return "{" + ",".join(parts) + "}"


def _element(value: Any, element: str) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int | float | Decimal | UUID) else _text(value, element)
