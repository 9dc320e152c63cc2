"""The words of the language: spellings that several readers share, and the tool kinds with their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

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
PARAMS: Spellings = ("params", "parameters")
QUERY_PARAMS: Spellings = ("params", "query", "query_params")
COMMAND_LINES: Spellings = ("cmds", "cmd", "command", "commands")
HTTP_BODY: Spellings = ("json", "payload", "body", "data", "content", "body_raw")
"""One field for every body: after rendering, mappings and lists are sent as JSON, text as it is."""
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


def _fields(names: str, *more: Spellings) -> tuple[Spellings, ...]:
    """Fields with one word each, and fields with several."""
    return (*more, *((name,) for name in names.split()))


@dataclass(frozen=True, slots=True)
class ToolKind:
    """The fields of a tool kind, beside the keys that every task has.

    Attributes:
        fields: its own fields.
        needs: canonical names of fields of which one must be there; all of them with ``needs_all``.
        name_fills: the field that the task's ``name`` fills too, where that may name what the task works on.
        keeps_to_driver: it runs in the process that drives the execution, never in a helper beside it: it holds
            what one process can have only, or drives something itself.
        words: of fields that take a few words only, those words; a template may stand for any of them.
        takes_references: it reads stored results itself; its input is handed over by reference, unfetched.
        without_effect: fields that other engines know and that say nothing here; they are accepted with a warning.
        takes_anything: any further field is accepted in the same way.
        below: keys of a task below which its fields may stand, too.
        commands: its fields that hold commands. Braces of other programs stay as they are in them, with a warning.
        extra: the extra of this package that its tool imports; empty: none. ``check`` warns where it is missing,
            and running the task fails.
    """

    fields: tuple[Spellings, ...]
    needs: tuple[str, ...] = ()
    needs_all: bool = False
    name_fills: str | None = None
    takes_references: bool = False
    keeps_to_driver: bool = False
    words: Mapping[str, Spellings] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    takes_anything: bool = False
    below: tuple[str, ...] = ("spec",)
    commands: tuple[str, ...] = ()
    extra: str = ""

    @property
    def all_fields(self) -> set[str]:
        """Every spelling of its fields, and those without effect."""
        return {*chain.from_iterable(self.fields), *self.without_effect}

    @property
    def liftable(self) -> dict[str, set[str]]:
        """The words of a task that may stand below another key, by that key."""
        fields = self.all_fields
        common = {*INPUT, *AUTH, *OUTPUT, *SET_BLOCKS, "payload", "workload", "output_select", "retry"}
        common |= {"sink"} if self.name_fills is None else {"sink", "name"}
        words = {"spec": (fields | common) - SPEC_WORDS, "runtime": fields}
        return {key: words[key] for key in self.below} if fields else {}

    @property
    def beside_step(self) -> set[str]:
        """Its fields in the oldest shape, where ``tool: http`` and the fields stand in the step itself."""
        own = {*self.all_fields, *AUTH} - {"step"}
        return own | {"name"} if self.name_fills is not None else own


CHUNK_SIZE = ("chunk_size", "batch_size", "fetch_size")
DATABASE_FILE = ("database", "db", "db_path", "database_path")
CURSOR_KINDS = ("postgres", "mysql", "sqlite")
"""The kinds from which a cursor loop claims rows."""

AS_WORDS = ("rows", "table", "arrow", "parquet")
"""The forms in which SQL tools return rows."""

TEXT_FORMATS = ("jsonl", "ndjson", "csv", "json")
ROW_FORMATS = ("parquet", *TEXT_FORMATS)

WAREHOUSES = ("snowflake", "bigquery")
"""Kinds that are sources of transfers only."""

ON_NEW_COLUMN = ("add", "ignore", "fail", "error")
"""What becomes of a column that a table lacks; ``error`` means ``fail``."""

PLACE_KINDS: Mapping[str, str] = {
    **{kind: kind for kind in ("postgres", "mysql", "sqlite", "duckdb", "object", "http", "result", *WAREHOUSES)},
    "mariadb": "mysql",
    **dict.fromkeys(("s3", "minio", "gcs", "gs", "file"), "object"),
    "ref": "result",
}
"""Words for the kind of a transfer's source or target, and what they mean."""

REQUEST_FIELDS = ("url", "method", "headers", "params", "timeout", "verify_ssl")
PAGING_FIELDS = ("next", "param", "start", "step")
PLACE_FIELDS = (
    *("kind", "type", "auth", "credential", "query", "command", "sql", "table", "params", "database", "path"),
    *("format", "request", "rows", "paging", "order_by", "ref", "mode", "key"),
)
"""Fields of a transfer's source and target; of http those of the request beside them, of files ``uri`` or ``url``."""


def likely_place(fields: Mapping[str, object]) -> str:
    """Guesses the kind of a source or target that has none."""
    if "ref" in fields:
        return "result"
    if "path" in fields or "uri" in fields:
        return "object"
    return "http" if "url" in fields else "postgres"


_ARTIFACT = ToolKind(
    _fields(
        "action uri step store compress content_type ttl scope format",
        ("ref", "result_ref", "reference"),
        ("value", "data", "payload", "content"),
    ),
    name_fills="name",
    without_effect=("select", "as", "encoding"),
    takes_references=True,
    keeps_to_driver=True,  # what is stored in memory is in this process
)
_SHELL = ToolKind(
    _fields("script code args interpreter env shell pipes", COMMAND_LINES, FOLDER, TIMEOUT),
    needs=("cmds", "script", "code"),
    commands=("cmds", "args", "env"),
    without_effect=("capture_output", "stream_output", "check", "job", "namespace"),
)
_BUCKET = ToolKind(
    _fields(
        "bucket content_type metadata prefix format encoding",
        ("operation", "action"),
        ("uri", "url"),
        ("key", "object", "keys", "blob", "object_name", "object_key"),
        ("source", "src"),
        ("destination", "dest", "target"),
        ("file", "path", "local_path", "file_path", "filename"),
        ("content", "data", "body", "value", "payload", "text"),
        ("limit", "max_keys", "max_results"),
    ),
    words={
        "operation": ("upload", "download", "list", "delete", "put", "get"),
        "format": (*ROW_FORMATS, "text", "bytes", "base64"),
        "encoding": ("base64", "utf-8", "text"),
    },
)


def _sql_server(extra: str) -> ToolKind:
    return ToolKind(
        _fields("script as", CHUNK_SIZE, SQL_FIELD, PARAMS, TIMEOUT),
        needs=("command", "script"),
        words={"as": AS_WORDS},
        without_effect=("pool", "db_schema", "fetch", "autocommit", "transaction"),
        extra=extra,
    )


TOOL_KINDS: Mapping[str, ToolKind] = {
    "artifact": _ARTIFACT,
    "bigquery": _sql_server("bigquery"),
    "container": ToolKind(
        _fields(
            "image command args env namespace script resources pipes volumes tolerations labels annotations",
            ("volume_mounts", "volumeMounts"),
            ("node_selector", "nodeSelector"),
            ("env_from", "envFrom"),
            ("working_dir", "workingDir", "workdir", "working_directory"),
            ("image_pull_policy", "imagePullPolicy"),
            ("image_pull_secrets", "imagePullSecrets"),
            ("security_context", "securityContext"),
            ("timeout", "timeoutSeconds", "activeDeadlineSeconds", *TIMEOUT[1:], "active_deadline_seconds"),
            ("service_account", "serviceAccountName", "service_account_name", "serviceAccount"),
        ),
        needs=("image",),
        name_fills="name",
        below=("spec", "runtime"),
        commands=("command", "args", "env"),
        extra="k8s",
        without_effect=(
            *("provider", "cleanup", "backoffLimit", "backoff_limit", "files", "ttlSecondsAfterFinished"),
            *("ttl_seconds", "ttl_seconds_after_finished", "remote"),
        ),
    ),
    "duckdb": ToolKind(
        _fields(
            "script as",
            CHUNK_SIZE,
            SQL_FIELD,
            DATABASE_FILE,
            PARAMS,
        ),
        needs=("command", "script"),
        words={"as": AS_WORDS},
        without_effect=("read_only", "extensions"),
        takes_references=True,
        keeps_to_driver=True,
    ),
    "ducklake": ToolKind(
        _fields(
            "script as data_path catalog_name metadata_schema",
            CHUNK_SIZE,
            SQL_FIELD,
            ("catalog", "catalog_connection"),
            PARAMS,
        ),
        needs=("command", "script"),
        words={"as": AS_WORDS},
        without_effect=("create_catalog", "use_catalog"),
        takes_references=True,
        keeps_to_driver=True,
        extra="ducklake",
    ),
    "gcs": replace(_BUCKET, extra="gcs"),
    "http": ToolKind(
        _fields(
            "method headers format",
            URL,
            QUERY_PARAMS,
            HTTP_BODY,
            ("form", "form_data"),
            ("verify_ssl", "verify", "ssl_verify"),
            ("follow_redirects", "allow_redirects"),
            TIMEOUT,
        ),
        needs=("url",),
        words={"format": TEXT_FORMATS},
        without_effect=("as", "stream", "response_type", "response_format"),
    ),
    "mysql": _sql_server("mysql"),
    "nats": ToolKind(
        _fields(
            "operation bucket key subject headers prefix ack ttl stream start durable max_messages",
            ("value", "data", "payload", "message"),
            TIMEOUT,
        ),
        needs=("operation",),
        name_fills="name",
    ),
    "noop": ToolKind(_fields("result"), takes_anything=True),
    "playbook": ToolKind(
        _fields("return_step version", ("path", "playbook", "playbook_path", "task"), TIMEOUT),
        needs=("path",),
        name_fills="path",
        without_effect=("wait",),
        keeps_to_driver=True,
    ),
    "postgres": ToolKind(
        _fields("script as key", CHUNK_SIZE, SQL_FIELD, PARAMS, TIMEOUT),
        needs=("command", "script"),
        words={"as": AS_WORDS},
        without_effect=("pool", "db_schema", "fetch", "autocommit", "transaction"),
    ),
    "python": ToolKind(
        _fields("code script libs isolation memory", TIMEOUT), needs=("code", "script"), without_effect=("env",)
    ),
    "resolve": _ARTIFACT,
    "result": _ARTIFACT,
    "s3": _BUCKET,
    "script": _SHELL,
    "secrets": ToolKind(
        _fields("provider key path", ("secret", "secret_name", "secret_id")),
        name_fills="name",
        words={"provider": tuple(chain.from_iterable(SECRET_PROVIDERS))},
    ),
    "shell": _SHELL,
    "snowflake": _sql_server("snowflake"),
    "spark": ToolKind(
        _fields(
            "code function script libs from format options params partition_by schemas collect max_rows tier",
            ("command", "sql", "query"),
        ),
        without_effect=("source", "target", "conf", "path", "output_as", "mode"),
        takes_references=True,
        keeps_to_driver=True,
    ),
    "sqlite": ToolKind(
        _fields("script as", CHUNK_SIZE, SQL_FIELD, DATABASE_FILE, PARAMS, TIMEOUT),
        needs=("command", "script"),
        words={"as": AS_WORDS},
        without_effect=("read_only",),
        keeps_to_driver=True,
    ),
    "transfer": ToolKind(
        _fields(
            "source target mode verify resumable",
            ("on_drift", "on_new_column"),
            ("chunk_size", "batch_size"),
            ("key", "keys", "key_columns"),
        ),
        needs=("source", "target"),
        needs_all=True,
        without_effect=("schemas",),
        words={
            "mode": ("append", "replace", "upsert"),
            "verify": ("rows", "checksum", "none"),
            "on_drift": ON_NEW_COLUMN,
            "resumable": ("true", "false", "auto"),
        },
        takes_references=True,
        keeps_to_driver=True,
    ),
    "workbook": ToolKind(_fields("task"), needs=("task",), name_fills="task"),
}
"""By name, in the order in which messages list them. Which class runs a kind stands in ``tools/registry.py``."""

SUPPORTED_KINDS = tuple(TOOL_KINDS)

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
    message = f"tool kind {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}"
    hint = did_you_mean(kind, SUPPORTED_KINDS)
    return f"{message}; {hint}" if hint else message
