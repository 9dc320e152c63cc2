"""The words of the language that several readers share, and the description of tool kinds, ours and others'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from itertools import chain
from pkgutil import iter_modules
from typing import Any

from noetl_dagster.errors import NoetlError
from noetl_dagster.playbook.wording import did_you_mean

Spellings = tuple[str, ...]
"""The words for one field, the canonical one first."""

API_VERSION = "noetl.io/v2"
KIND = "Playbook"
METADATA_KEYS = ("name", "path", "version", "description", "tags", "owners", "schedule", "partitions")
DEFAULTS = ("policy", "timeout", "retry", "on_error")
"""Keys of the root's ``spec``, which apply to all steps."""

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
MAX_IN_FLIGHT: Spellings = ("max_in_flight", "concurrency")

SPEC_WORDS = frozenset({"timeout", "timeout_s", "timeout_seconds", "policy", "result", "isolation", "memory"})
"""Keys of a task's ``spec`` that are its own, whatever fields the tool has."""

LITERAL_FIELDS = frozenset({"code", "function"})
"""Tool fields that hold source code; braces in them are not templates."""

SQL_FIELD: Spellings = ("command", "query", "commands", "sql", "statement")
URL: Spellings = ("url", "endpoint")
AUTH: Spellings = ("auth", "credential", "credentials")
HTTP_BODY: Spellings = ("json", "payload", "body", "data", "content", "body_raw")
"""One field for every body: after rendering, mappings and lists are sent as JSON, text as it is."""
REQUEST = ("url", "params", "headers", "form")
"""Fields of a request that are sent as text."""
TIMEOUT: Spellings = ("timeout", "timeout_seconds", "timeout_s")
FOLDER: Spellings = ("cwd", "workdir", "working_dir", "working_directory")

SECRET_PROVIDERS: tuple[Spellings, ...] = (
    ("env",),
    ("file",),
    ("credential",),
    ("aws", "aws_secrets_manager"),
    ("aws_ssm", "ssm"),
    ("google", "gcp"),
    ("kubernetes", "k8s"),
)
"""The stores of secrets, with their spellings."""


def secret_provider(text: str) -> str | None:
    """Returns the provider that a text names, in any of its spellings; None for an unknown one."""
    return next((names[0] for names in SECRET_PROVIDERS if text.lower() in names), None)


@dataclass(frozen=True)
class ToolKind:
    """Describes a kind of tool: its fields, beside the keys that every task has, and the class that runs it.

    Attributes:
        name: the word after ``kind:``.
        tool: module and name of its class, ``package.module:Class``. The class loads when a task of the kind runs, so
            that ``check`` needs none of the libraries of a tool.
        fields: a field, or its spellings with the canonical one first -> its meaning.
        needs: canonical names of required fields; one of them is enough, except with ``needs_all``.
        name_fills: the field that the task's ``name`` fills too, where that may name what the task works on.
        check: reports what is wrong with a task; takes its ``Block``, and its fields under canonical names, unrendered.
        keeps_to_driver: it runs in the process that drives the execution, never in a helper beside it: it holds
            what one process can have only, or drives something itself.
        words: of fields that take a few words only, those words; a template may stand for any of them.
        takes_references: it reads stored results itself; its input is handed over by reference, unfetched.
        result: the keys of its result, if it has no others.
        without_effect: fields that other engines know and that say nothing here; they are accepted with a warning.
        takes_anything: any further field is accepted in the same way.
        below: keys of a task below which its fields may stand, too.
        commands: its fields that hold commands. Braces of other programs stay as they are in them, with a warning.
        sent: its fields that are sent as text. A value inside such a text is spelled as one that is the whole field.
        extra: the extra of this package that its tool imports; empty: none. ``check`` warns where it is missing,
            and running the task fails.
    """

    name: str
    tool: str
    fields: Mapping[str | Spellings, str]
    needs: tuple[str, ...] = ()
    needs_all: bool = False
    name_fills: str | None = None
    check: Callable[[Any, dict[str, Any]], None] | None = None
    takes_references: bool = False
    keeps_to_driver: bool = False
    words: Mapping[str, Spellings] = field(default_factory=dict)
    result: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    takes_anything: bool = False
    below: tuple[str, ...] = ("spec",)
    commands: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    extra: str = ""

    @cached_property
    def spellings(self) -> Mapping[str, Spellings]:
        """The spellings of each field, by its canonical name, which is the first of them."""
        every = ((key,) if isinstance(key, str) else key for key in self.fields)
        return {names[0]: names for names in every}

    @cached_property
    def meanings(self) -> Mapping[str, str]:
        """The meaning of each field, by its canonical name."""
        return dict(zip(self.spellings, self.fields.values(), strict=True))

    @cached_property
    def all_fields(self) -> set[str]:
        """Every spelling of its fields, and those without effect."""
        return {*chain.from_iterable(self.spellings.values()), *self.without_effect}

    @cached_property
    def liftable(self) -> dict[str, set[str]]:
        """The words of a task that may stand below another key, by that key."""
        fields = self.all_fields
        common = {*INPUT, *AUTH, *OUTPUT, *SET_BLOCKS, "payload", "workload", "output_select", "retry"}
        common |= {"sink"} if self.name_fills is None else {"sink", "name"}
        words = {"spec": (fields | common) - SPEC_WORDS, "runtime": fields}
        return {key: words[key] for key in self.below} if fields else {}

    @cached_property
    def beside_step(self) -> set[str]:
        """Its fields in the oldest shape, where ``tool: http`` and the fields stand in the step itself."""
        own = {*self.all_fields, *AUTH} - {"step"}
        return own | {"name"} if self.name_fills is not None else own


SCRIPT = "File or URL with the code: a path, or {uri, source: {type}}"
"""The meaning of ``script``."""
CHUNK_SIZE = ("chunk_size", "batch_size", "fetch_size")
DATABASE_FILE = ("database", "db", "db_path", "database_path")
CURSOR_KINDS = ("postgres", "mysql", "sqlite")
"""The kinds from which a cursor loop claims rows."""

NUMBER_WORDS = ("text", "float")
NUMBERS = (
    "JSON numbers that neither a 64-bit integer nor a double holds: text, or float for the nearest double; "
    "default: they fail the call"
)
TEXT_FORMATS = ("jsonl", "ndjson", "csv", "json")
ROW_FORMATS = ("parquet", *TEXT_FORMATS)

ON_NEW_COLUMN = ("add", "ignore", "fail", "error")
"""What becomes of a column that a table lacks; ``error`` means ``fail``."""

TOOLS = "noetl_dagster.tools"
"""The package with our tools, and the group of entry points by which other packages add theirs."""


class _ToolKinds(Mapping[str, ToolKind]):
    """Finds the kinds of tools by name, and lists them in the order in which messages do.

    The modules and sub-packages of ``noetl_dagster.tools`` list theirs as ``KINDS``. Other packages register entry
    points of that group, named as the kind. Only these take time to find; they are not read for a kind of ours.
    """

    @cached_property
    def _own(self) -> Mapping[str, ToolKind]:
        names = [module.name for module in iter_modules(import_module(TOOLS).__path__)]
        modules = [import_module(f"{TOOLS}.{name}") for name in names]
        kinds = chain.from_iterable(getattr(module, "KINDS", ()) for module in modules)
        return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}

    @cached_property
    def _others(self) -> EntryPoints:
        return entry_points(group=TOOLS)

    def __getitem__(self, name: str) -> ToolKind:
        if name in self._own:
            return self._own[name]
        points = self._others.select(name=name)
        if not points:
            raise KeyError(name)
        places = ", ".join(point.value for point in points)
        if len(points) > 1:
            raise NoetlError(f"tool kind {name!r} is ambiguous: {places}; uninstall one of the packages")
        try:
            kind = points[name].load()
        except Exception as error:
            raise NoetlError(f"tool kind {name!r}: {places} cannot be imported: {error}") from error
        if not isinstance(kind, ToolKind) or kind.name != name:
            raise NoetlError(f"tool kind {name!r}: {places} is not its ToolKind")
        return kind

    def __iter__(self) -> Iterator[str]:
        return chain(self._own, sorted(self._others.names - self._own.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


TOOL_KINDS: Mapping[str, ToolKind] = _ToolKinds()

_OTHER_KINDS: Mapping[str, str] = {
    "agent": "an agent decides by itself what it calls, which no log can repeat; call the model's API with kind http, "
    "or the agent's entry point with kind python, and route by the answer",
    "mcp": "a server of the Model Context Protocol is called with kind http (method: POST, json: {jsonrpc: '2.0', "
    "id: 1, method: tools/call, params: {name, arguments}}), or with its client library in kind python",
}
"""Kinds of other engines that this one has not, with the reason and the alternative."""


def unsupported_kind(kind: str) -> str:
    """Returns why a tool kind is not supported, and what to write instead."""
    if kind in _OTHER_KINDS:
        return f"tool kind {kind!r} is not supported: {_OTHER_KINDS[kind]}"
    message = f"tool kind {kind!r} is not supported; supported: {', '.join(TOOL_KINDS)}"
    hint = did_you_mean(kind, tuple(TOOL_KINDS))
    return f"{message}; {hint}" if hint else message
