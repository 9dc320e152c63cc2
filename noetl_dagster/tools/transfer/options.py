"""The two ends of a transfer, as the playbook describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.store import LocalStore
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.playbook.tool_kinds import PLACE_KINDS, REQUEST_FIELDS, likely_place
from noetl_dagster.playbook.wording import suggestion
from noetl_dagster.tools.access.credentials import CredentialType
from noetl_dagster.tools.access.objects import open_bucket
from noetl_dagster.tools.base import Toolbox, ToolCall, count_of
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.sql.statements import BoundStatement, bind, without_percent
from noetl_dagster.tools.sql.tables import WriteMode, write_mode


class PlaceKind(StrEnum):
    POSTGRES = "postgres"
    DUCKDB = "duckdb"
    OBJECT = "object"
    HTTP = "http"
    RESULT = "result"


class Paging(BaseModel):
    """How one page of http leads to the next.

    Attributes:
        next: dotted path in the body of what leads on: the next page's address, or with ``param`` its value; the last
            page has none there, or null.
        param: the query parameter that leads to a page: a cursor with ``next``; alone a number that counts up until a
            page has no rows.
        start: the number of the first page, or its offset.
        step: by how much the number grows; ``rows``: by the rows of the page, as an offset does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    next: str = ""
    param: str = ""
    start: int = 1
    step: int | Literal["rows"] = 1

    @model_validator(mode="after")
    def _leads_on(self) -> Paging:
        if not self.next and not self.param:
            raise ValueError("needs 'next', a path in the body, or 'param', a query parameter")
        return self


class Place(BaseModel):
    """One end of a transfer.

    Attributes:
        query, table, params: of postgres and duckdb; a query reads, a table reads or is written.
        database: file of duckdb, relative to the playbook's folder.
        path: of an object: ``s3://bucket/key``, ``gs://bucket/key``, ``file:///path`` or a path; one that ends with
            ``/`` is a folder of files.
        format: parquet, jsonl, json or csv; default: the path's ending.
        request: of http: ``url``, ``method``, ``headers``, ``params``, ``timeout``.
        rows: of http: dotted path of the list of rows in the body.
        paging: of http: how one page leads to the next.
        order_by: of postgres and duckdb: unique columns that are never null, in whose order the rows are read, so
            that a transfer can go on in the middle.
        ref: of a result: its reference.
        key: unique columns, for upsert.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kind: PlaceKind
    auth: Any = None
    query: str = ""
    table: str = ""
    params: Any = Field(default_factory=dict)
    database: str | None = None
    path: str = ""
    format: str | None = None
    request: dict[str, Any] = Field(default_factory=dict)
    rows: str = ""
    paging: Paging | None = None
    order_by: tuple[str, ...] = ()
    ref: Any = None
    mode: str | None = None
    key: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of files."""
        return self.kind is PlaceKind.OBJECT and self.path.endswith("/")


def read_place(value: Any, end: str, call: ToolCall) -> Place:
    """The place that ``source`` or ``target`` describes.

    Raises:
        ToolError: names the end and the field.
    """
    if not isinstance(value, Mapping):
        raise ToolError(f"transfer in step {call.step}: {end} must be a mapping with 'kind'", kind="schema")
    fields = {str(name): item for name, item in value.items() if item is not None}
    kind = str(fields.pop("kind", fields.pop("type", "")) or likely_place(fields)).lower()
    fields["kind"] = PLACE_KINDS.get(kind, kind)
    fields["auth"] = fields.get("auth", fields.pop("credential", None))
    for old in ("command", "sql"):
        if old in fields:
            fields["query"] = fields.pop(old)
    if fields["kind"] == PlaceKind.HTTP:
        fields["request"] = {name: fields.pop(name) for name in REQUEST_FIELDS if name in fields}
    elif "uri" in fields or "url" in fields:
        fields["path"] = fields.pop("uri", None) or fields.pop("url")
    for name in ("key", "order_by"):
        if isinstance(fields.get(name), str):
            fields[name] = (fields[name],)
    try:
        return Place.model_validate(fields)
    except ValidationError as error:
        raise ToolError(
            f"transfer in step {call.step}: {_wrong(end, error.errors()[0])}", kind="schema"
        ) from None


def _wrong(end: str, detail: ErrorDetails) -> str:
    """What is wrong with a field, and what may stand there."""
    *path, name = (str(part) for part in detail["loc"])
    where = ".".join((end, *path))
    if detail["type"] == "extra_forbidden":
        known = tuple((Paging if path else Place).model_fields)
        return f"{where} has no field {name!r}; {suggestion(name, known, 'fields')}"
    if detail["loc"] == ("kind",):
        return f"{where}.kind is {detail['input']!r}; {suggestion(str(detail['input']), tuple(PLACE_KINDS), 'kinds')}"
    return f"{where}.{name}: {detail['msg']}"


async def object_place(place: Place, call: ToolCall, box: Toolbox) -> tuple[Any, str]:
    """The bucket and key of an object, or None and the path of a local file."""
    parts = urlsplit(place.path)
    if parts.scheme in ("", "file"):
        if not parts.path:
            raise ToolError(f"transfer in step {call.step}: an object needs 'path'", kind="schema")
        return None, str(Path(call.folder, parts.path))
    kind = {"s3": "s3", "minio": "s3", "gs": "gcs", "gcs": "gcs"}.get(parts.scheme)
    if kind is None:
        raise ToolError(f"transfer: {parts.scheme}:// is unknown; use s3://, gs:// or file://", kind="schema")
    try:
        credential = await box.credentials.resolve(place.auth, CredentialType(kind))
        return open_bucket(box.settings, kind, parts.netloc, credential), parts.path.lstrip("/")
    except CredentialError as error:
        message = f"transfer in step {call.step}: {error}"
        raise ToolError(message, kind="credential", retryable=error.retryable) from None


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a bucket, or a ``local`` one, whose store begins there."""

    store: Any
    prefix: str
    local: Path | None = None

    def key(self, name: str) -> str:
        return f"{self.prefix}{name}"


async def open_folder(place: Place, call: ToolCall, box: Toolbox) -> Folder:
    """The folder of a place; a local one is made where it is missing."""
    store, path = await object_place(place, call, box)
    if store is not None:
        return Folder(store, f"{path.strip('/')}/" if path.strip("/") else "")
    return Folder(LocalStore(path, mkdir=True), "", Path(path))


async def data_files(folder: Folder) -> tuple[list[str], list[str]]:
    """The names of a folder's files, and of the folders in it, but for those that begin with ``_`` or ``.``."""
    found = await obstore.list_with_delimiter_async(folder.store, prefix=folder.prefix or None)
    files = [meta["path"].rpartition("/")[2] for meta in found["objects"]]
    below = [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]
    return _seen(files), _seen(below)


def _seen(names: list[str]) -> list[str]:
    return sorted(name for name in names if name and name[0] not in "_.")


def place_format(place: Place) -> RowFormat:
    """The format of a file, and of the files that a folder is given: Parquet where nothing says another."""
    if place.is_folder and not place.format:
        return RowFormat.PARQUET
    return row_format(place.format, place.path)


DEFAULT_CHUNK = 10_000
DEFAULT_PART = 500_000
_TABLES = (PlaceKind.POSTGRES, PlaceKind.DUCKDB)


class Verify(StrEnum):
    """What is compared at the end."""

    ROWS = "rows"
    CHECKSUM = "checksum"
    NONE = "none"


class OnDrift(StrEnum):
    """What becomes of a column that the target has not."""

    ERROR = "error"
    IGNORE = "ignore"
    ADD = "add"


class Resumable(StrEnum):
    TRUE = "true"
    FALSE = "false"
    AUTO = "auto"


Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Options:
    """``size``: rows of a chunk; ``part``: the least rows of a file in a folder."""

    mode: WriteMode
    size: int
    part: int
    verify: Verify
    on_drift: OnDrift
    resumable: Resumable


def read_options(call: ToolCall, target: Place) -> Options:
    """The options of a call.

    Raises:
        ToolError: for a word that is unknown, or that the target cannot follow.
    """
    config = call.config
    mode = config.get("mode") or target.mode
    if mode is None:
        mode = WriteMode.REPLACE if target.kind is PlaceKind.OBJECT else WriteMode.APPEND
    size = count_of(call, "chunk_size")
    options = Options(
        write_mode(str(mode)),
        size or DEFAULT_CHUNK,
        size or DEFAULT_PART,
        _word(Verify, "verify", config.get("verify"), Verify.ROWS, call),
        _word(OnDrift, "on_drift", config.get("on_drift"), OnDrift.ERROR, call),
        _word(Resumable, "resumable", config.get("resumable"), Resumable.AUTO, call),
    )
    where = f"transfer in step {call.step}"
    if options.verify is Verify.CHECKSUM and target.kind is PlaceKind.HTTP:
        raise ToolError(
            f"{where}: verify: checksum reads the target back, which target.kind: http cannot; write verify: rows",
            kind="schema",
        )
    if options.on_drift is OnDrift.ADD and target.kind not in _TABLES:
        raise ToolError(f"{where}: on_drift: add is for tables; write error or ignore", kind="schema")
    if options.resumable is Resumable.TRUE and target.kind is not PlaceKind.POSTGRES and not target.is_folder:
        raise ToolError(
            f"{where}: resumable: true is for postgres targets, and folders (target.path: s3://lake/rows/); "
            "leave it out",
            kind="schema",
        )
    return options


def _word(words: type[Word], field: str, given: Any, default: Word, call: ToolCall) -> Word:
    text = str(default if given is None else given).strip().lower()
    if text in [word.value for word in words]:
        return words(text)
    known = ", ".join(words)
    raise ToolError(
        f"transfer in step {call.step}: {field}: {text!r} is unknown; write {known}", kind="schema"
    )


def statement_of(place: Place) -> BoundStatement:
    """What a table or query is read with."""
    query = place.query or f"SELECT * FROM {sql_identifier(place.table)}"
    return bind(without_percent([query], place.params)[0], place.params)
