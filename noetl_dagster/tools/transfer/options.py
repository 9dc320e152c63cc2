"""What a transfer is told beside its two ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.tools.limits import count_of
from noetl_dagster.tools.sql.tables import WriteMode, write_mode
from noetl_dagster.tools.transfer.places import Place, PlaceKind

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
