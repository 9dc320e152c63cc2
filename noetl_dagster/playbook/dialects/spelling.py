"""The words of the language: which are known where, and which mean the same.

In every tuple of spellings the first word is the canonical one.
"""

from __future__ import annotations

from noetl_dagster.playbook.models import LoopMode

API_VERSION = "noetl.io/v2"
KIND = "Playbook"

ROOT_KEYS = (
    "apiVersion",
    "kind",
    "metadata",
    "workload",
    "workflow",
    "keychain",
    "workbook",
    "executor",
    "dagster",
    "tracing",
)
ROOT_REMEDIES = {
    "name": "write it in metadata: name",
    "path": "write it in metadata: path",
    "version": "write it in metadata: version",
    "description": "write it in metadata: description",
    "steps": "the list of steps is called 'workflow'",
    "vars": "put inputs into workload; steps write to ctx with set",
    "ctx": "put inputs into workload; steps write to ctx with set",
}
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

STEP_KEYS = (
    *("step", "desc", "tool", "next", "loop", "set", "input", "output", "spec", "retry", "sink"),
    *("output_select", "asset", "checks", "from", "state"),
)
STEP_REMEDIES = {
    "case": "routes are written as next: {arcs: [{step, when}]}",
    "eval": "rules are written in the tool's spec: {policy: {rules: [{when, then}]}}",
    "when": "admission is written as spec: {policy: {admit: {rules: [{when, then: {allow: true}}]}}}",
    "name": "a step is named by 'step'",
    "type": "the kind of a tool is written as tool: {kind: ...}",
}

ARC_KEYS = ("step", "when", "set", "on")
ARC_REMEDIES = {
    "then": "an arc names its target: {step: name, when: ...}",
    "else": "an arc without 'when' is the default",
}
ROUTING_KEYS = ("spec", "arcs")

LOOP_IN = ("in", "collection")
LOOP_ITERATOR = ("iterator", "element")
LOOP_KEYS = ("in", "iterator", "cursor", "spec", "collection", "element", "mode", "concurrency", "chunk_size")
RESERVED_ITERATORS = frozenset({"workload", "ctx", "iter", "loop", "input", "execution_id", "output"})
MAX_IN_FLIGHT = ("max_in_flight", "concurrency")
LOOP_MODES = {"async": LoopMode.PARALLEL}

RULE_KEYS = ("when", "then", "else")

STEP_ONLY_SPEC = frozenset(
    {
        "loop_mode",
        "fanout",
        "dispatch",
        "max_attempts",
        "priority",
        "weight",
        "pool",
        "strict_ctx",
        "allow_partial",
        "fail_fast",
        "mode",
        "max_in_flight",
        "concurrency",
        "chunk_size",
        "frame",
        "admit",
        "kubernetes",
    }
)
"""Keys of a step's, a loop's or the executor's spec that say nothing to its tasks."""

TASK_KEYS = (
    "name",
    "kind",
    "input",
    "set",
    "spec",
    "output",
    "output_select",
    "auth",
    "retry",
    "sink",
    "assert",
    "desc",
)
TASK_REMEDIES = {
    "case": "routes are written as next: {arcs: [{step, when}]} of the step",
    "eval": "rules are written in spec: {policy: {rules: [{when, then}]}}",
    "when": "admission is written as spec: {policy: {admit: {rules: [{when, then: {allow: true}}]}}} of the step",
    "next": "it belongs to the step; indent it as 'tool' is",
    "loop": "it belongs to the step; indent it as 'tool' is",
}

SPEC_WORDS = frozenset({"timeout", "timeout_s", "timeout_seconds", "policy", "result", "isolation", "memory"})
"""Keys of a task's ``spec`` that are its own, whatever fields the tool has."""

DATABASE_FIELDS = {
    **{name: name for name in ("db_host", "db_port", "db_user", "db_password", "db_name")},
    "db_conn_string": "connection_string",
}
"""Fields of a postgres task that say how to connect -> the field of a credential."""

ENCODED_FIELDS = {"command_b64": "command", "commands_b64": "command", "code_b64": "code"}
"""Fields that hold another one in base64."""

LITERAL_FIELDS = frozenset({"code", "function"})
"""Tool fields that hold source code; braces in them are not templates."""

HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
