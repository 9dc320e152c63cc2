"""Results in their two forms, the envelope for templates and the shape that the log checks; contexts of events.

An envelope is ``{status, data | ref, extracted, error, meta, http | pg | py, results}``. The log keeps
``{status, data | reference, extracted, context}``, where ``context`` holds everything else of the envelope.

The context of an event explains it to people: it is bounded and has no secrets. Workload, patches and collections are
stored in full in the events that define them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from noetl_dagster.errors import ToolError, kind_of
from noetl_dagster.process.redaction import MASK, SECRETS
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.values import encode_json, legible, legible_text

Envelope = dict[str, Any]

OK = "ok"
ERROR = "error"
ERROR_MESSAGE_CHARACTERS = 2_000

_OWN = frozenset({"status", "data", "ref", "extracted"})

OBJECT_BYTES = 10 * 1024
"""``{"_truncated": true, "_size": <bytes>}`` replaces a value whose JSON is larger."""

STEP_RESULTS = "_step_results"

_SECRET = re.compile(
    r"(pass(word|wd|phrase)?|secret|token|api_?key|access_?key|private_?key|credential|authorization|cookie)s?$",
    re.IGNORECASE,
)
_ADDRESS_PASSWORD = re.compile(r"(\w+://[^/\s:@]*:)[^/\s@]+@")


def as_json(envelope: Envelope) -> Envelope:
    """Returns an envelope with its reference as JSON, for one that is part of another value."""
    reference = envelope.get("ref")
    if isinstance(reference, ResultRef):
        return envelope | {"ref": reference.model_dump(mode="json", exclude_defaults=True)}
    return envelope


def to_result(envelope: Envelope) -> dict[str, Any]:
    """Returns an envelope in the form of the log."""
    result: dict[str, Any] = {"status": envelope["status"]}
    if envelope.get("ref") is not None:
        result["reference"] = as_json(envelope)["ref"]
    elif "data" in envelope:
        result["data"] = envelope["data"]
    if envelope.get("extracted"):
        result["extracted"] = envelope["extracted"]
    context = {key: value for key, value in envelope.items() if key not in _OWN and value is not None}
    if context:
        result["context"] = context
    return result


def from_result(result: dict[str, Any] | None) -> Envelope:
    """Returns the envelope of a ``result`` of the log."""
    if result is None:
        return {"status": OK, "data": None}
    envelope: Envelope = {"status": result["status"]}
    if "reference" in result:
        envelope["ref"] = ResultRef.model_validate(result["reference"])
    elif "data" in result:
        envelope["data"] = result["data"]
    if "extracted" in result:
        envelope["extracted"] = result["extracted"]
    return envelope | (result.get("context") or {})


def error_envelope(error: BaseException, source: str | None = None) -> Envelope:
    """Returns the envelope of a failed task, without secrets; ``source`` is the kind of its tool."""
    part = {
        "kind": kind_of(error),
        "source": source,
        "message": legible_text(SECRETS.redact(str(error) or type(error).__name__)[:ERROR_MESSAGE_CHARACTERS]),
        "retryable": bool(getattr(error, "retryable", False)),
        "status": getattr(error, "status", None),
        "code": getattr(error, "code", None),
    }
    if (asked := getattr(error, "retry_after", None)) is not None:
        part["retry_after"] = asked
    details = legible(SECRETS.redacted(error.details)) if isinstance(error, ToolError) else {}
    return {"status": ERROR, "error": part} | details


def event_context(
    *,
    execution_id: int,
    catalog_id: int | None,
    command_id: str,
    workload: Mapping[str, Any],
    vars: Mapping[str, Any],
    results: Mapping[str, Envelope],
) -> dict[str, Any]:
    """Returns the context of an event about a command: with the ``ctx`` values, and a summary of each step's result."""
    return {
        "execution_id": str(execution_id),
        "job_id": command_id,
        "catalog_id": str(catalog_id) if catalog_id is not None else None,
        "workload": sanitised(workload),
        "vars": sanitised(vars),
        STEP_RESULTS: truncated({step: step_summary(envelope) for step, envelope in results.items()}),
    }


def sanitised(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values without internal keys, with masked secrets, each of bounded size."""
    return {
        str(key): truncated(SECRETS.redacted(_masked(str(key), value)))
        for key, value in values.items()
        if not str(key).startswith("_")
    }


def truncated(value: Any) -> Any:
    """Returns the value, or a marker if it is too large."""
    size = len(encode_json(value))
    return {"_truncated": True, "_size": size} if size > OBJECT_BYTES else value


def step_summary(envelope: Envelope) -> dict[str, Any]:
    """Returns the summary of a step's result for an event, never the data itself."""
    data = envelope.get("data")
    stored = envelope.get("ref") is not None
    return {
        "has_data": stored or data is not None,
        "status": "success" if envelope["status"] == "ok" else "error",
        "data_type": "reference" if stored else type(data).__name__,
    }


def _masked(key: str, value: Any) -> Any:
    """Masks secrets by the name of their key, at any depth, and passwords in addresses."""
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), entry) for inner, entry in value.items()}
    if isinstance(value, list):
        return [_masked(key, entry) for entry in value]
    if value is not None and _SECRET.search(key):
        return MASK
    if isinstance(value, str) and "://" in value:
        return _ADDRESS_PASSWORD.sub(rf"\g<1>{MASK}@", value)
    return value
