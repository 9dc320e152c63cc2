"""What of an execution's context may stand in an event: bounded, without secrets, for people to read.

Source: "Context Sanitization" of the loop and retry architecture. The log's own values (workload, patches,
collections) are the truth and never cut; these rules are for the copies that explain an event.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.envelopes import Envelope

OBJECT_BYTES = 10 * 1024
"""A value whose JSON is larger is replaced by ``{"_truncated": true, "_size": <bytes>}``."""

MASK = "***"

STEP_RESULTS = "_step_results"

_SECRET = re.compile(
    r"(pass(word|wd|phrase)?|secret|token|api_?key|access_?key|private_?key|credential|authorization|cookie)s?$",
    re.IGNORECASE,
)
_TYPES: dict[type, str] = {dict: "dict", list: "list", str: "str", bool: "bool", int: "int", float: "float"}


def event_context(
    *,
    execution_id: int,
    catalog_id: int | None,
    command_id: str,
    workload: Mapping[str, Any],
    vars: Mapping[str, Any],
    results: Mapping[str, Envelope],
) -> dict[str, Any]:
    """The context of an event about a command.

    Args:
        vars: the execution's ``ctx`` values.
        results: envelopes of the steps that ended; only a summary of each is kept.
    """
    return {
        "execution_id": str(execution_id),
        "job_id": command_id,
        "catalog_id": str(catalog_id) if catalog_id is not None else None,
        "workload": sanitised(workload),
        "vars": sanitised(vars),
        STEP_RESULTS: truncated({step: step_summary(envelope) for step, envelope in results.items()}),
    }


def sanitised(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without internal keys, secrets masked, every one of bounded size."""
    return {
        str(key): truncated(_masked(str(key), value))
        for key, value in values.items()
        if not str(key).startswith("_")
    }


def truncated(value: Any) -> Any:
    """The value, or the mark that stands for one that is too large."""
    size = len(encode_json(value))
    return {"_truncated": True, "_size": size} if size > OBJECT_BYTES else value


def step_summary(envelope: Envelope) -> dict[str, Any]:
    """What an event says about the result of a step: never the data itself."""
    data = envelope.get("data")
    stored = envelope.get("ref") is not None
    return {
        "has_data": stored or data is not None,
        "status": "success" if envelope["status"] == "ok" else "error",
        "data_type": "reference" if stored else _TYPES.get(type(data), type(data).__name__),
    }


def _masked(key: str, value: Any) -> Any:
    """Secrets by the name of their key, at any depth, and passwords inside of addresses."""
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), entry) for inner, entry in value.items()}
    if isinstance(value, list):
        return [_masked(key, entry) for entry in value]
    if value is not None and _SECRET.search(key):
        return MASK
    if isinstance(value, str) and "://" in value:
        return _ADDRESS_PASSWORD.sub(rf"\g<1>{MASK}@", value)
    return value


_ADDRESS_PASSWORD = re.compile(r"(\w+://[^/\s:@]*:)[^/\s@]+@")
