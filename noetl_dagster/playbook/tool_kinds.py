"""The tool kinds of the language: the fields of each, and what it needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

Spellings = tuple[str, ...]
"""The words for one field, the canonical one first."""

SQL_FIELD: Spellings = ("command", "query", "commands", "sql", "statement")
URL: Spellings = ("url", "endpoint")
PARAMS: Spellings = ("params", "parameters")
COMMAND_LINES: Spellings = ("cmds", "cmd", "command", "commands")
HTTP_BODY: Spellings = ("json", "payload", "body", "data", "content", "body_raw")
"""One field for every body: after rendering, mappings and lists are sent as JSON, text as it is."""

SECRET_PROVIDERS: tuple[Spellings, ...] = (
    ("env",),
    ("file",),
    ("credential",),
    ("aws", "aws_secrets_manager"),
    ("aws_ssm", "ssm"),
    ("google", "gcp"),
    ("kubernetes", "k8s"),
)
"""Who keeps secrets."""


def secret_provider(text: str) -> str | None:
    """The provider that a text names, in any of its spellings; None for an unknown one."""
    return next((names[0] for names in SECRET_PROVIDERS if text in names), None)


def _fields(names: str, *more: Spellings) -> tuple[Spellings, ...]:
    """Fields with one word each, and fields with several."""
    return (*more, *((name,) for name in names.split()))


@dataclass(frozen=True, slots=True)
class ToolKind:
    """What a task of one kind may say beside the keys that every task has.

    Attributes:
        fields: its own fields.
        needs: canonical names of fields of which one must be there; all of them with ``needs_all``.
        name_fills: the field that the task's ``name`` fills too, where that may name what the task works on.
        keeps_to_driver: it runs in the process that drives the execution, never in a helper beside it: it holds
            what one process can have only, or drives something itself.
        words: of fields that take a few words only, those words; a template may stand for any of them.
        takes_references: it reads stored results itself; its input is handed over by reference, unfetched.
    """

    fields: tuple[Spellings, ...]
    needs: tuple[str, ...] = ()
    needs_all: bool = False
    name_fills: str | None = None
    takes_references: bool = False
    keeps_to_driver: bool = False
    words: Mapping[str, Spellings] = field(default_factory=dict)


_ARTIFACT = ToolKind(
    _fields("action uri store compress", ("ref", "result_ref"), ("value", "data")),
    name_fills="name",
    takes_references=True,
    keeps_to_driver=True,  # what is stored in memory is in this process
)
_SHELL = ToolKind(
    _fields("script code env cwd timeout shell pipes", COMMAND_LINES), needs=("cmds", "script", "code")
)

TOOL_KINDS: Mapping[str, ToolKind] = {
    "artifact": _ARTIFACT,
    "container": ToolKind(
        _fields("image command env namespace runtime script resources timeout pipes"),
        name_fills="name",
    ),
    "duckdb": ToolKind(
        _fields("script extensions", SQL_FIELD, ("database", "db"), PARAMS),
        needs=("command", "script"),
        takes_references=True,
        keeps_to_driver=True,
    ),
    "http": ToolKind(
        _fields(
            "method params headers form timeout follow_redirects as",
            URL,
            HTTP_BODY,
            ("verify_ssl", "verify"),
        ),
        needs=("url",),
    ),
    "nats": ToolKind(
        _fields("operation bucket key subject headers prefix ack ttl", ("value", "data", "payload")),
        needs=("operation",),
        name_fills="name",
    ),
    "noop": ToolKind(_fields("result")),
    "playbook": ToolKind(
        _fields("return_step timeout version", ("path", "playbook", "playbook_path")),
        needs=("path",),
        keeps_to_driver=True,
    ),
    "postgres": ToolKind(
        _fields("script timeout chunk_size", SQL_FIELD, PARAMS),
        needs=("command", "script"),
    ),
    "python": ToolKind(_fields("code script libs timeout env"), needs=("code", "script")),
    "resolve": _ARTIFACT,
    "result": _ARTIFACT,
    "script": ToolKind(
        _fields("script code env cwd timeout pipes", COMMAND_LINES), needs=("script", "cmds", "code")
    ),
    "secrets": ToolKind(
        _fields("provider secret key path"),
        name_fills="name",
        words={"provider": tuple(chain.from_iterable(SECRET_PROVIDERS))},
    ),
    "shell": _SHELL,
    "spark": ToolKind(
        _fields(
            "code function script libs source target conf path from format options params partition_by schemas "
            "collect output_as max_rows mode tier",
            ("command", "sql", "query"),
        ),
        takes_references=True,
        keeps_to_driver=True,
    ),
    "transfer": ToolKind(
        _fields("source target mode chunk_size key schemas"),
        needs=("source", "target"),
        needs_all=True,
        takes_references=True,
        keeps_to_driver=True,
    ),
    "workbook": ToolKind(_fields("task"), needs=("task",), name_fills="task"),
}
"""By name, in the order in which messages list them. Which class runs a kind stands in ``tools/registry.py``."""

SUPPORTED_KINDS = tuple(TOOL_KINDS)
