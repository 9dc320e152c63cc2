"""The words of the language: which are known where, and which mean the same.

In every tuple of spellings the first word is the canonical one.
"""

from __future__ import annotations

from noetl_dagster.playbook.models import Backoff, LoopMode

API_VERSION = "noetl.io/v2"
KIND = "Playbook"

SUPPORTED_KINDS = (
    "artifact",
    "container",
    "duckdb",
    "http",
    "nats",
    "noop",
    "playbook",
    "postgres",
    "python",
    "resolve",
    "result",
    "script",
    "secrets",
    "shell",
    "spark",
    "transfer",
    "workbook",
)

ROOT_KEYS = ("apiVersion", "kind", "metadata", "workload", "workflow", "keychain", "workbook", "executor")
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
AUTH = ("auth", "credential")
SET_BLOCKS = {"set": None, "set_ctx": "ctx", "set_iter": "iter", "vars": "ctx"}
"""Key of a set block -> the scope that its bare names mean; None: ctx outside loops, iter inside."""
DESCRIPTION = ("desc", "description")

STEP_KEYS = ("step", "desc", "tool", "next", "loop", "set", "input", "output", "spec", "retry", "sink")
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
BACKOFFS = {"constant": Backoff.NONE, "fixed": Backoff.NONE}

RULE_KEYS = ("when", "then", "else")
ACTION_KEYS = ("do", "attempts", "backoff", "delay", "to", "set")
ATTEMPTS = ("attempts", "max_attempts")
DELAY = ("delay", "initial_delay", "delay_seconds")

STEP_ONLY_SPEC = frozenset(
    {
        "loop_mode",
        "fanout",
        "dispatch",
        "max_attempts",
        "strict_ctx",
        "allow_partial",
        "fail_fast",
        "mode",
        "max_in_flight",
        "concurrency",
        "chunk_size",
        "frame",
        "admit",
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
    "desc",
)

LITERAL_FIELDS = frozenset({"code", "function"})
"""Tool fields that hold source code; braces in them are not templates."""

SQL_FIELD = ("command", "query", "commands", "sql", "statement")
URL = ("url", "endpoint")
HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
HTTP_BODY = ("json", "payload", "body", "data", "content", "body_raw")
"""One field for every body: after rendering, mappings and lists are sent as JSON, text as it is."""

TOOL_FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "http": (
        URL,
        ("method",),
        ("params",),
        ("headers",),
        HTTP_BODY,
        ("form",),
        ("timeout",),
        ("verify_ssl", "verify"),
        ("follow_redirects",),
        ("as",),
    ),
    "postgres": (SQL_FIELD, ("params", "parameters"), ("script",), ("timeout",), ("chunk_size",)),
    "duckdb": (SQL_FIELD, ("database", "db"), ("params", "parameters"), ("script",), ("extensions",)),
    "python": (("code",), ("script",), ("libs",), ("timeout",), ("env",)),
    "spark": (
        ("code",),
        ("function",),
        ("script",),
        ("command", "sql", "query"),
        ("libs",),
        ("source",),
        ("target",),
        ("conf",),
        ("path",),
        ("from",),
        ("format",),
        ("options",),
        ("params",),
        ("partition_by",),
        ("schemas",),
        ("collect",),
        ("output_as",),
        ("max_rows",),
        ("mode",),
        ("tier",),
    ),
    "playbook": (("path", "playbook", "playbook_path"), ("return_step",), ("timeout",), ("version",)),
    "workbook": (("task",),),
    "noop": (("result",),),
    "nats": (
        ("operation",),
        ("bucket",),
        ("key",),
        ("value", "data", "payload"),
        ("subject",),
        ("headers",),
        ("prefix",),
        ("ack",),
        ("ttl",),
    ),
    "artifact": (("action",), ("ref", "result_ref"), ("uri",), ("value", "data"), ("store",), ("compress",)),
    "transfer": (("source",), ("target",), ("mode",), ("chunk_size",), ("key",), ("schemas",)),
    "shell": (
        ("cmds", "cmd", "command", "commands"),
        ("script",),
        ("env",),
        ("cwd",),
        ("timeout",),
        ("shell",),
    ),
    "script": (
        ("script",),
        ("cmds", "cmd", "command", "commands"),
        ("code",),
        ("env",),
        ("cwd",),
        ("timeout",),
    ),
    "container": (
        ("image",),
        ("command",),
        ("env",),
        ("namespace",),
        ("runtime",),
        ("script",),
        ("resources",),
        ("timeout",),
    ),
    "secrets": (("provider",), ("secret",), ("key",), ("path",)),
}
TOOL_FIELDS["result"] = TOOL_FIELDS["resolve"] = TOOL_FIELDS["artifact"]

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "http": ("url",),
    "postgres": ("command", "script"),
    "duckdb": ("command", "script"),
    "python": ("code", "script"),
    "playbook": ("path",),
    "workbook": ("task",),
    "nats": ("operation",),
    "transfer": ("source", "target"),
    "shell": ("cmds", "script"),
    "script": ("script", "cmds", "code"),
}
"""One of these must be there; a transfer needs both of its own."""

NAMES_ITS_OBJECT = {
    "workbook": "task",
    "nats": "name",
    "artifact": "name",
    "result": "name",
    "resolve": "name",
    "secrets": "name",
    "container": "name",
}
"""Kinds whose ``name`` may name what they work on, not only the task; and the field that it then fills."""
