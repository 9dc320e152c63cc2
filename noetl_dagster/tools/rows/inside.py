"""Where the rows are in a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.tools.rows.jsonable import is_table


def rows_of(value: Any) -> list[Mapping[str, Any]]:
    """The rows inside a result.

    A list of mappings as it is; of a SQL result its ``rows``; of an http result its body; of a mapping whose
    ``data``, ``rows`` or ``items`` is a list of mappings that list; else the mapping as one row. A table's
    rows as mappings. Anything else becomes one row ``{value: ...}`` each.
    """
    if is_table(value):
        return list(value.to_dict("records") if hasattr(value, "to_dict") else value.to_pylist())
    if isinstance(value, Mapping):
        if "status_code" in value and "data" in value:
            return rows_of(value["data"])
        for name in ("rows", "data", "items"):
            inner = value.get(name)
            if isinstance(inner, list) and all(isinstance(item, Mapping) for item in inner):
                return inner
        return [value]
    if isinstance(value, list | tuple):
        # the exact type first: asking an abstract class takes as long as the rest
        return [
            item if type(item) is dict or isinstance(item, Mapping) else {"value": item} for item in value
        ]
    return [] if value is None else [{"value": value}]
