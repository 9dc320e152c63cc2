"""The place of a sink's part, and the contract of the stores that hold parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import Sink
from noetl_dagster.tools.rows.formats import RowFormat, row_format
from noetl_dagster.tools.sql.tables import WriteMode, write_mode

SCHEMES = {"s3": "s3", "minio": "s3", "gs": "gcs", "gcs": "gcs", "file": "file"}
STAGED = "_staged"  # folder of parts that are not published; readers skip names that begin with _
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class SinkKind(StrEnum):
    """The kinds of sinks that stage parts."""

    DUCKDB = "duckdb"
    SQLITE = "sqlite"
    MYSQL = "mysql"
    FILE = "file"
    S3 = "s3"
    GCS = "gcs"


class PartPlace(BaseModel, frozen=True):
    """The place of a sink's part, without templates; the completion of its iteration records it.

    Attributes:
        bucket: of s3 and gcs; empty for the bucket of the credential or the settings.
        path: of duckdb and sqlite the database's file, of mysql empty; else the folder of the parts, or the one
            file that each part replaces.
        part: name of the part, the same for every try of its iteration's attempt.
        on_new_column: of tables: what becomes of columns that they lack; see :func:`drift_of_sink`.
        own: columns that name the iteration, which are filled in if the table has them.
    """

    kind: SinkKind
    path: str
    part: str
    bucket: str = ""
    table: str = ""
    format: RowFormat = RowFormat.PARQUET
    mode: WriteMode = WriteMode.APPEND
    key: tuple[str, ...] = ()
    auth: str | None = None
    on_new_column: str | None = None
    own: dict[str, Any] = {}

    @property
    def target(self) -> PartPlace:
        """The same place for all parts that go to one table or folder."""
        path = self.path if self.is_table else self.folder
        return self.model_copy(update={"path": path, "part": "", "own": {}})

    @property
    def is_table(self) -> bool:
        """True if parts are rows of a table."""
        return self.kind in (SinkKind.DUCKDB, SinkKind.SQLITE, SinkKind.MYSQL)

    @property
    def staged(self) -> str:
        """Path of the part before it is published."""
        return str(PurePosixPath(self.folder, STAGED, f"{self.part}.{self.format}"))

    @property
    def mark(self) -> str:
        """Path of the marker that names the part that was last published as the one file."""
        return str(PurePosixPath(self.folder, STAGED, f"{PurePosixPath(self.path).name}.published"))

    @property
    def published(self) -> str:
        """Path of the part after it is published."""
        return self.path if self.is_one_file else str(PurePosixPath(self.path, f"{self.part}.{self.format}"))

    @property
    def folder(self) -> str:
        """Folder of the parts."""
        return str(PurePosixPath(self.path).parent) if self.is_one_file else self.path

    @property
    def is_one_file(self) -> bool:
        """True if the path is a file, not a folder of parts."""
        return PurePosixPath(self.path).suffix.lower() in (".parquet", ".jsonl", ".ndjson")


def place_of(sink: Sink, part: str, own: dict[str, Any], folder: str) -> PartPlace:
    """Returns the place of a part; raises ``ToolError`` if a field of the sink is missing or invalid.

    Args:
        sink: without templates.
        folder: of the playbook's file, for relative paths.
    """
    if sink.tool in (SinkKind.DUCKDB, SinkKind.SQLITE, SinkKind.MYSQL):
        kind, database = SinkKind(sink.tool), sink.database
        if not sink.table:
            raise ToolError(f"a sink to {kind} needs 'table'", kind="schema")
        if kind is not SinkKind.MYSQL and not database:
            raise ToolError(f"a sink to {kind} needs 'database', a file", kind="schema")
        return PartPlace(
            kind=kind,
            path=str(Path(folder, database).resolve()) if database else "",
            part=part,
            table=sink.table,
            mode=write_mode(sink.mode),
            key=sink.key,
            auth=sink.auth,
            on_new_column=sink.on_new_column,
            own=own,
        )
    parts = urlsplit(sink.path or "")
    scheme = parts.scheme or sink.tool
    if scheme not in SCHEMES:
        raise ToolError(f"a sink cannot write to {scheme}://; use s3://, minio://, gs:// or a path", kind="schema")
    kind = SinkKind(SCHEMES[scheme])
    bucket = parts.netloc if parts.scheme and kind is not SinkKind.FILE else ""
    path = parts.path.strip("/") if kind is not SinkKind.FILE else str(Path(folder, parts.path).resolve())
    if not path.strip("/"):
        raise ToolError(f"a sink of tool {sink.tool} needs 'path', below which its parts are", kind="schema")
    format = _format(sink.format, path)
    return PartPlace(kind=kind, bucket=bucket, path=path, part=part, format=format, auth=sink.auth)


def _format(word: str | None, path: str) -> RowFormat:
    if word is None and not PurePosixPath(path).suffix:
        return RowFormat.PARQUET
    format = row_format(word, path)
    if format not in (RowFormat.PARQUET, RowFormat.JSONL):
        raise ToolError(f"a sink writes parquet or jsonl, not {format}", kind="schema")
    return format


def part_prefix(execution_id: int, step: str, visit: int) -> str:
    """Returns the prefix of the names of all parts of a visit, which no other names have."""
    safe = _UNSAFE.sub("-", step)
    if safe != step:  # a hash distinguishes names that differ only in replaced characters
        safe = f"{safe}-{hashlib.sha256(step.encode()).hexdigest()[:8]}"
    return f"{execution_id}.{safe}.{visit}."


class PartTarget(Protocol):
    """A store of parts, which shows each part to readers once. Every method may be called again after a failure.

    A part is staged while its command runs, published when the completion of its iteration is in the log, and settled
    at the end of the step, on resumption and on cancellation: parts without a completion are discarded.
    """

    async def stage(self, place: PartPlace, result: Any) -> None:
        """Writes the rows of a result, at least one, where no reader looks; replaces a part of the same name."""

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """Shows parts to readers, each once."""

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Returns the names of unpublished parts with a prefix."""

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Returns the names of those parts, none of them staged, that are not published here either."""

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        """Removes unpublished parts."""
