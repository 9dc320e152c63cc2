"""Safe forms of template values in SQL: ``{{ name | sql_literal }}``, ``{{ table | sql_identifier }}``.

Binding (``params`` with ``:name``) is better still; these are for the places that no parameter can fill.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from jinja2 import Undefined

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.views import View, plain


def sql_literal(value: Any) -> str:
    """A value as one SQL constant that no content can break out of.

    None is ``NULL``, numbers and booleans stand bare, text is quoted, dates and times are quoted ISO 8601,
    bytes a ``bytea`` constant, mappings and lists quoted JSON.

    Raises:
        TemplateError: for other types, and for text with NUL, which SQL cannot hold.
    """
    value = _known(value)
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(int(value)) if value >= 0 else f"({int(value)})"
    if isinstance(value, float | Decimal):
        return _number(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dt.datetime | dt.date | dt.time | UUID):
        return _quoted(value.isoformat() if not isinstance(value, UUID) else str(value))
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, Mapping | list | tuple):
        return _quoted(json.dumps(value, ensure_ascii=False, default=str))
    raise TemplateError(f"sql_literal: a value of type {type(value).__name__} has no SQL form")


def sql_list(values: Any) -> str:
    """A list as ``(1, 'b', NULL)``, for ``IN``; an empty one as ``(NULL)``, which is in nothing.

    Raises:
        TemplateError: for anything but a list.
    """
    values = _known(values)
    if not isinstance(values, list | tuple | set | frozenset):
        raise TemplateError(f"sql_list: a list is needed, not {type(values).__name__}")
    return f"({', '.join(map(sql_literal, values)) or 'NULL'})"


def sql_identifier(value: Any) -> str:
    """A name, or a dotted one, as quoted identifiers: ``public.my table`` -> ``"public"."my table"``.

    Raises:
        TemplateError: for an empty name and for anything but text.
    """
    value = _known(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise TemplateError(f"sql_identifier: a name is needed, not {value!r}")
    parts = value.split(".")
    if not all(parts):
        raise TemplateError(f"sql_identifier: {value!r} has an empty part")
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def _known(value: Any) -> Any:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    return plain(value) if isinstance(value, View) else value


def _number(value: float | Decimal) -> str:
    text = str(value)
    if not Decimal(text).is_finite():
        return f"'{text}'"
    return f"({text})" if text.startswith("-") else text


def _quoted(text: str) -> str:
    """A string constant that means the same whatever ``standard_conforming_strings`` says."""
    if "\0" in text:
        raise TemplateError("sql_literal: text with a NUL character cannot stand in SQL")
    escaped = text.replace("'", "''")
    if "\\" in escaped:
        doubled = escaped.replace("\\", "\\\\")
        return f" E'{doubled}'"
    return f"'{escaped}'"


FILTERS: dict[str, Callable[..., str]] = {
    "sql_literal": sql_literal,
    "sql_list": sql_list,
    "sql_identifier": sql_identifier,
}
