"""Values as messages and stored entries hold them."""

from __future__ import annotations

import base64
from typing import Any

import orjson

from noetl_dagster.tools.rows.jsonable import to_jsonable


def encoded(value: Any) -> bytes:
    """Text as it is, bytes as they are, everything else as JSON."""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else orjson.dumps(to_jsonable(value, "value"))


def decoded(content: bytes) -> dict[str, Any]:
    """``{value}`` or ``{value, encoding: base64}`` of stored bytes."""
    try:
        return {"value": orjson.loads(content)}
    except orjson.JSONDecodeError:
        pass
    try:
        return {"value": content.decode()}
    except UnicodeDecodeError:
        return {"value": base64.b64encode(content).decode(), "encoding": "base64"}
