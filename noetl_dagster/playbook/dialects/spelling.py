"""The words of the language that several readers know: which mean the same, and which mean nothing.

In every tuple of spellings the first word is the canonical one.
"""

from __future__ import annotations

from noetl_dagster.playbook.fields import spellings_of
from noetl_dagster.playbook.models import Loop
from noetl_dagster.playbook.tool_kinds import AUTH, TOOL_KINDS, ToolKind

API_VERSION = "noetl.io/v2"
KIND = "Playbook"
METADATA_KEYS = ("name", "path", "version", "description", "tags", "owners", "schedule", "partitions")

INPUT = ("input", "args")
OUTPUT = ("output", "outcome")
SET_BLOCKS = {"set": None, "set_ctx": "ctx", "set_iter": "iter", "vars": "ctx"}
"""Key of a set block -> the scope that its bare names mean; None: ctx outside loops, iter inside."""
DESCRIPTION = ("desc", "description")
WHEN = ("when", "cond")
DOCUMENTARY = (
    *(*DESCRIPTION, "title", "label", "labels", "id", "version", "tags", "metadata", "annotations"),
    *("comment", "comments", "note", "notes", "doc", "docs", "author", "owner", "owners"),
)
"""Words for readers, of a step or a task; they change nothing."""

LOOP_IN = ("in", "collection")
LOOP_ITERATOR = ("iterator", "element")
LOOP_SETTINGS = ("mode", "max_in_flight", "chunk_size", "fail_fast", "allow_partial", "strict_ctx", "frame")
MAX_IN_FLIGHT = spellings_of(Loop, "max_in_flight")

SPEC_WORDS = frozenset({"timeout", "timeout_s", "timeout_seconds", "policy", "result", "isolation", "memory"})
"""Keys of a task's ``spec`` that are its own, whatever fields the tool has."""

LITERAL_FIELDS = frozenset({"code", "function"})
"""Tool fields that hold source code; braces in them are not templates."""


def liftable(kind: ToolKind) -> dict[str, set[str]]:
    """The words of a task that may stand below another key: ``spec``, or ``runtime`` of a container."""
    fields = kind.all_fields
    common = {*INPUT, *AUTH, *OUTPUT, *SET_BLOCKS, "payload", "workload", "output_select", "retry", "sink"}
    if kind.name_fills is not None:
        common.add("name")
    below = {"spec": (fields | common) - SPEC_WORDS} if fields else {}
    return below | {"runtime": fields} if kind is TOOL_KINDS["container"] else below
