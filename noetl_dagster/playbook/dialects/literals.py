"""Checks the literal fields of tasks; templates are known only when the task runs."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import (
    CHUNK_SIZE,
    PAGING_FIELDS,
    PLACE_FIELDS,
    PLACE_KINDS,
    REQUEST_FIELDS,
    ROW_FORMATS,
    TOOL_KINDS,
    likely_place,
)
from noetl_dagster.playbook.wording import described, is_template


def check_task(block: Block, kind: str) -> None:
    """Reports what is wrong with the fields of a task."""
    for names in TOOL_KINDS[kind].fields if kind in TOOL_KINDS else ():
        if names[0] == CHUNK_SIZE[0]:
            _check_size(block, names)
    if kind == "postgres":
        _check_key(block)
    elif kind == "nats":
        _check_subscription(block)
    elif kind == "transfer":
        check_transfer(block)


def _check_size(block: Block, names: tuple[str, ...]) -> None:
    """Rows of a chunk."""
    key = next((name for name in names if block.values.get(name) is not None), None)
    if key is None or (isinstance(block[key], str) and is_template(block[key])):
        return
    try:
        if isinstance(block[key], bool) or int(block[key]) < 0:
            raise ValueError
    except (TypeError, ValueError):
        message = f"{key} must be a number of rows, 1 or more, found {described(block[key])}"
        block.error(f"{message}; leave it out for the usual size", key)


def _check_key(block: Block) -> None:
    key = block.values.get("key")
    if isinstance(key, (list, dict)):
        block.error(
            f"key must be the name of one column, found {described(key)}; name one whose values are unique and never "
            "null, or make one of several in the SQL",
            "key",
        )


def _check_subscription(block: Block) -> None:
    if block.values.get("operation") == "subscribe" and not any(
        block.values.get(name) for name in ("stream", "subject")
    ):
        block.error("subscribe needs 'stream' or 'subject'", "operation", ProblemKind.MISSING_FIELD)


_TABLES = ("postgres", "duckdb")


def check_transfer(block: Block) -> None:
    """Reports what is wrong with ``source`` and ``target``, and with options that the target cannot follow."""
    source, target = _end(block, "source"), _end(block, "target")
    if source is not None:
        _check_end(source)
        _check_read(source)
    kind = None if target is None else _check_end(target)
    if target is not None and kind is not None:
        _check_written(block, target, kind)


def _end(block: Block, name: str) -> Block | None:
    """An end that is known before the task runs."""
    value = block.values.get(name)
    if value is None or _is_open(value):
        return None
    return block.reading.block(block.values, name, f"{block.what}, {name}")


def _check_end(end: Block) -> str | None:
    """The kind of place that it is, where that is known."""
    key = next((name for name in ("kind", "type") if end.values.get(name) is not None), None)
    given = likely_place(end.values) if key is None else end[key]
    if _is_open(given):
        return None
    kind = PLACE_KINDS.get(str(given).lower())
    if kind is None:
        if key is not None:
            end.check_word(key, tuple(PLACE_KINDS))
        return None
    known = (*PLACE_FIELDS, *(REQUEST_FIELDS if kind == "http" else ("uri", "url")))
    end.drop(*known, *(name for name in end.values if is_template(str(name))))
    end.close(known)
    end.check_word("format", ROW_FORMATS)
    _check_paging(end)
    return kind


def _check_paging(end: Block) -> None:
    value = end.values.get("paging")
    if value is None or _is_open(value):
        return
    paging = end.reading.block(end.values, "paging", f"{end.what}, paging")
    if paging is None:
        return
    paging.drop(*PAGING_FIELDS)
    if not any(paging.values.get(name) for name in ("next", "param")) and not any(paging.rest()):
        message = "paging needs 'next', a path in the body, or 'param', a query parameter"
        end.error(message, "paging", ProblemKind.MISSING_FIELD)
    paging.close(PAGING_FIELDS)
    for name in ("start", "step"):
        given = paging.values.get(name)
        if given is None or _is_open(given) or (name == "step" and given == "rows"):
            continue
        if isinstance(given, bool) or not str(given).strip().lstrip("-").isdigit():
            words = "a whole number or 'rows'" if name == "step" else "a whole number"
            paging.error(f"{name} must be {words}, found {described(given)}", name)


def _check_read(source: Block) -> None:
    query = next((name for name in ("query", "command", "sql") if source.values.get(name)), None)
    if query is not None and source.values.get("table"):
        message = f"'table' and {query!r} both say what to read; keep one"
        source.error(message, "table", ProblemKind.CONFLICTING_FIELDS)


def _check_written(block: Block, target: Block, kind: str) -> None:
    """Reports options that the target cannot follow."""
    if kind == "result":
        target.error("a result is no target; use the artifact tool", "kind")
        return
    path = next((target[name] for name in ("path", "uri", "url") if target.values.get(name)), "")
    folder = kind == "object" and str(path).endswith("/")
    file = kind == "object" and not folder and not _is_open(path)
    mode = _word(block, "mode") or _word(target, "mode")
    holder = block if _word(block, "mode") else target
    if file and mode in ("append", "upsert"):
        remedy = ", or a folder (target.path: s3://lake/rows/)" if mode == "append" else ""
        holder.error(
            f"mode: {mode} is not for one file, which is replaced as a whole; write mode: replace{remedy}",
            "mode",
        )
    elif folder and mode == "upsert":
        holder.error("mode: upsert is for tables; of a folder write append or replace", "mode")
    elif kind == "duckdb" and mode == "upsert" and not _has_key(block) and not _has_key(target):
        holder.error("upsert into duckdb needs 'key': its unique columns", "mode", ProblemKind.MISSING_FIELD)
    if _word(block, "verify") == "checksum" and kind == "http":
        message = "verify: checksum reads the target back, which http cannot; write verify: rows"
        block.error(message, "verify")
    if _word(block, "on_drift") == "add" and kind not in _TABLES:
        block.error("on_drift: add is for tables; write error or ignore", "on_drift")
    if _word(block, "resumable") == "true" and (file or kind in ("duckdb", "http")):
        message = "resumable: true is for postgres targets, and folders (target.path: s3://lake/rows/)"
        block.error(f"{message}; leave it out", "resumable")


def _has_key(block: Block) -> bool:
    return any(block.values.get(name) for name in ("key", "keys", "key_columns"))


def _word(block: Block, name: str) -> str:
    value = block.values.get(name)
    return "" if value is None else str(value).strip().lower()


def _is_open(value: Any) -> bool:
    return isinstance(value, str) and is_template(value)
