"""The fields of a transfer: its two ends, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import obstore
from obstore.store import LocalStore
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.playbook.wording import suggestion
from noetl_dagster.settings import Settings
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.access.clients import open_bucket
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import ToolCall, ToolContext, count_of
from noetl_dagster.tools.files import check_path, written_in
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.sql.statements import BoundStatement, bind, without_percent
from noetl_dagster.tools.sql.tables import OnDrift, WriteMode, write_mode
from noetl_dagster.tools.transfer import PLACE_KINDS, REQUEST_FIELDS, likely_place, refusals

DEFAULT_CHUNK = 10_000
DEFAULT_PART = 500_000


class EndKind(StrEnum):
    """The kind of a source or target."""

    POSTGRES = "postgres"
    MYSQL = "mysql"
    SQLITE = "sqlite"
    SNOWFLAKE = "snowflake"
    BIGQUERY = "bigquery"
    DUCKDB = "duckdb"
    OBJECT = "object"
    HTTP = "http"
    RESULT = "result"


class Paging(BaseModel, frozen=True, extra="forbid"):
    """Finds the next page of an http source.

    Attributes:
        next: dotted path in the body of the next page's address, or with ``param`` of its value; absent or null on the
            last page.
        param: the query parameter that selects a page: a cursor with ``next``; without it a number that counts up until
            a page has no rows.
        start: the number or offset of the first page.
        step: the increment of the number; ``rows``: the number of rows of the page, as for an offset.
    """

    next: str = ""
    param: str = ""
    start: int = 1
    step: int | Literal["rows"] = 1

    @model_validator(mode="after")
    def _finds_the_next(self) -> Paging:
        if not self.next and not self.param:
            raise ValueError("needs 'next', a path in the body, or 'param', a query parameter")
        return self


class TransferEnd(BaseModel, frozen=True, extra="forbid", arbitrary_types_allowed=True):
    """The source or the target of a transfer.

    Attributes:
        query, table, params: of databases; a query is read, a table is read or written.
        database: file of duckdb and sqlite, relative to the playbook's folder.
        path: of an object: ``s3://bucket/key``, ``gs://bucket/key``, ``file:///path`` or a path; with ``/`` at its
            end, a folder of files.
        format: parquet, jsonl, json or csv; default: the path's ending.
        numbers: of files of JSON: the answer to numbers that would change.
        request: of http: ``url``, ``method``, ``headers``, ``params``, ``timeout``.
        rows: of http: dotted path of the list of rows in the body.
        paging: of http: how to find the next page.
        order_by: of postgres and duckdb: unique columns that are never null. Rows are read in their order, so that a
            transfer can resume in the middle.
        ref: of a result: its reference.
        key: unique columns, for upsert.
    """

    kind: EndKind
    auth: Any = None
    query: str = ""
    table: str = ""
    params: Any = Field(default_factory=dict)
    database: str | None = None
    path: str = ""
    format: str | None = None
    numbers: Numbers = Numbers.EXACT
    request: dict[str, Any] = Field(default_factory=dict)
    rows: str = ""
    paging: Paging | None = None
    order_by: tuple[str, ...] = ()
    ref: Any = None
    mode: str | None = None
    key: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """True if it is a folder of files."""
        return self.kind is EndKind.OBJECT and self.path.endswith("/")

    @property
    def file_format(self) -> RowFormat:
        """The format of the file, or of new files of the folder, which are Parquet by default."""
        if self.is_folder and not self.format:
            return RowFormat.PARQUET
        return row_format(self.format, self.path)

    @property
    def takes_tables(self) -> bool:
        """True if it is written from Arrow tables."""
        if self.kind is EndKind.OBJECT:
            return self.file_format is RowFormat.PARQUET
        return self.kind is EndKind.DUCKDB

    def statement(self) -> BoundStatement:
        """Returns the statement that reads the table or query."""
        query = self.query or f"SELECT * FROM {sql_identifier(self.table)}"
        return bind(without_percent([query], self.params)[0], self.params)

    def file(self, name: str) -> TransferEnd:
        """Returns a file of the folder."""
        return self.model_copy(update={"path": self.path + name})


def read_end(value: Any, end: str, call: ToolCall, settings: Settings) -> TransferEnd:
    """Parses ``source`` or ``target``; raises ``ToolError`` with the name of the end and the field.

    A template cannot lead its path out of the folder that the playbook writes.
    """
    if not isinstance(value, Mapping):
        raise call.error(f"{end} must be a mapping with 'kind'")
    fields = {str(name): item for name, item in value.items() if item is not None}
    kind = str(fields.pop("kind", fields.pop("type", "")) or likely_place(fields)).lower()
    fields["kind"] = PLACE_KINDS.get(kind, kind)
    fields["auth"] = fields.get("auth", fields.pop("credential", None))
    for old in ("command", "sql"):
        if old in fields:
            fields["query"] = fields.pop(old)
    if fields["kind"] == EndKind.HTTP:
        fields["request"] = {name: fields.pop(name) for name in REQUEST_FIELDS if name in fields}
        fields |= {name: item for name, item in fields["request"].items() if name == "numbers"}
    elif "uri" in fields or "url" in fields:
        fields["path"] = fields.pop("uri", None) or fields.pop("url")
    for name in ("key", "order_by"):
        if isinstance(fields.get(name), str):
            fields[name] = (fields[name],)
    try:
        checked = TransferEnd.model_validate(fields)
    except ValidationError as error:
        raise call.error(_field_error(end, error.errors()[0])) from None
    written, where = call.task.config.get(end), f"transfer in step {call.step}, {end}"
    if checked.kind is EndKind.OBJECT:
        check_path(checked.path, written_in(written, "uri", "url", "path"), call.folder, settings, f"{where}.path")
    if checked.kind in (EndKind.DUCKDB, EndKind.SQLITE):
        check_path(checked.database, written_in(written, "database"), call.folder, settings, f"{where}.database")
    return checked


def _field_error(end: str, detail: ErrorDetails) -> str:
    *path, name = (str(part) for part in detail["loc"])
    where = ".".join((end, *path))
    if detail["type"] == "extra_forbidden":
        fields = tuple((Paging if path else TransferEnd).model_fields)
        return f"{where} has no field {name!r}; {suggestion(name, fields, 'fields')}"
    if detail["loc"] == ("kind",):
        return f"{where}.kind is {detail['input']!r}; {suggestion(str(detail['input']), tuple(PLACE_KINDS), 'kinds')}"
    return f"{where}.{name}: {detail['msg']}"


async def open_object(end: TransferEnd, call: ToolCall, context: ToolContext) -> tuple[Any, str]:
    """Returns the store and key of an object, or None and the path of a local file."""
    parts = urlsplit(end.path)
    if parts.scheme in ("", "file"):
        if not parts.path:
            raise call.error("an object needs 'path'")
        return None, str(Path(call.folder, parts.path))
    kind = {"s3": "s3", "minio": "s3", "gs": "gcs", "gcs": "gcs"}.get(parts.scheme)
    if kind is None:
        raise ToolError(f"transfer: {parts.scheme}:// is unknown; use s3://, gs:// or file://", kind="schema")
    try:
        credential = await context.credentials.resolve(end.auth, CredentialType(kind))
        return open_bucket(context.settings, kind, parts.netloc, credential), parts.path.lstrip("/")
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """A folder of a bucket, or a ``local`` one, which is the root of its store."""

    store: Any
    prefix: str
    local: Path | None = None

    @classmethod
    async def open(cls, end: TransferEnd, call: ToolCall, context: ToolContext) -> ObjectFolder:
        """Opens a folder; creates a local one if it is missing."""
        store, path = await open_object(end, call, context)
        if store is not None:
            return cls(store, f"{path.strip('/')}/" if path.strip("/") else "")
        return cls(LocalStore(path, mkdir=True), "", Path(path))

    def key(self, name: str) -> str:
        """Returns the key of a file of the folder."""
        return f"{self.prefix}{name}"

    async def data_files(self) -> tuple[list[str], list[str]]:
        """Returns the names of the files and of the folders in it, except those that begin with ``_`` or ``.``."""
        listed = await obstore.list_with_delimiter_async(self.store, prefix=self.prefix or None)
        files = [meta["path"].rpartition("/")[2] for meta in listed["objects"]]
        below = [name.rstrip("/").rpartition("/")[2] for name in listed["common_prefixes"]]
        return _visible(files), _visible(below)


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if name and name[0] not in "_.")


class Verify(StrEnum):
    """The comparison after the rows are written."""

    ROWS = "rows"
    CHECKSUM = "checksum"
    NONE = "none"


class Resumable(StrEnum):
    """The ways to stage rows, so that a command that runs again resumes the transfer."""

    TRUE = "true"
    FALSE = "false"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The options; ``size``: rows of a chunk at most; ``part``: rows of a file in a folder at least."""

    mode: WriteMode
    size: int
    part: int
    verify: Verify
    on_drift: OnDrift
    resumable: Resumable


def read_options(call: ToolCall, target: TransferEnd) -> TransferOptions:
    """Parses the options of a call; raises ``ToolError`` for one that is unknown, or not of the target."""
    config = call.config
    mode = config.get("mode") or target.mode
    if mode is None:
        mode = WriteMode.REPLACE if target.kind is EndKind.OBJECT else WriteMode.APPEND
    size = count_of(call, "chunk_size")
    options = TransferOptions(
        write_mode(str(mode)),
        size or DEFAULT_CHUNK,
        size or DEFAULT_PART,
        call.word("verify", Verify, Verify.ROWS),
        call.word("on_drift", OnDrift, OnDrift.ERROR),
        call.word("resumable", Resumable, Resumable.AUTO),
    )
    words = {name: str(getattr(options, name)) for name in ("mode", "verify", "on_drift", "resumable")}
    for _, message in refusals(target.kind, target.path, **words, has_key=bool(target.key)):
        raise call.error(message)
    return options
