"""``kind: transfer``: its fields and their checks; moves rows between databases, files, http and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import ON_NEW_COLUMN, ROW_FORMATS, ToolKind
from noetl_dagster.playbook.wording import described, is_open, is_template

_WAREHOUSES = ("snowflake", "bigquery")
"""Kinds that are sources only."""

PLACE_KINDS: Mapping[str, str] = {
    **{kind: kind for kind in ("postgres", "mysql", "sqlite", "duckdb", "object", "http", "result", *_WAREHOUSES)},
    "mariadb": "mysql",
    **dict.fromkeys(("s3", "minio", "gcs", "gs", "file"), "object"),
    "ref": "result",
}
"""Words for the kind of a source or target, and what they mean."""

REQUEST_FIELDS = ("url", "method", "headers", "params", "timeout", "verify_ssl", "charset", "numbers")
_PAGING_FIELDS = ("next", "param", "start", "step")
_PLACE_FIELDS = (
    *("kind", "type", "auth", "credential", "query", "command", "sql", "table", "params", "database", "path"),
    *("format", "request", "rows", "paging", "order_by", "ref", "mode", "key"),
)
"""Fields of a source and target; of http those of the request beside them, of files ``uri`` or ``url``."""


def likely_place(fields: Mapping[str, object]) -> str:
    """Guesses the kind of a source or target that has none."""
    if "ref" in fields:
        return "result"
    if "path" in fields or "uri" in fields:
        return "object"
    return "http" if "url" in fields else "postgres"


def _check(block: Block, config: dict[str, Any]) -> None:
    """Reports what is wrong with ``source`` and ``target``, and with options that the target cannot follow."""
    # ends that are known before the task runs
    ends = {name: None if is_open(block.values.get(name)) else block.child(name) for name in ("source", "target")}
    source, target = ends["source"], ends["target"]
    if source is not None:
        _check_end(source)
        query = next((name for name in ("query", "command", "sql") if source.values.get(name)), None)
        if query is not None and source.values.get("table"):
            source.conflict(f"'table' and {query!r} both say what to read; keep one", "table")
    kind = None if target is None else _check_end(target)
    if target is not None and kind is not None:
        _check_written(block, target, kind)


def _check_end(end: Block) -> str | None:
    """Checks an end of a transfer by its kind, if that is known."""
    key = next((name for name in ("kind", "type") if end.values.get(name) is not None), None)
    word = likely_place(end.values) if key is None else end[key]
    if is_open(word):
        return None
    kind = PLACE_KINDS.get(str(word).lower())
    if kind is None:
        if key is not None:
            end.check_word(key, tuple(PLACE_KINDS))
        return None
    fields = (*_PLACE_FIELDS, *(REQUEST_FIELDS if kind == "http" else ("uri", "url", "numbers")))
    end.drop(*fields, *(name for name in end.values if is_template(str(name))))
    end.close(fields)
    end.check_word("format", ROW_FORMATS)
    paging = None if is_open(end.values.get("paging")) else end.child("paging")
    if paging is not None:
        _check_paging(end, paging)
    return kind


def _check_paging(end: Block, paging: Block) -> None:
    paging.drop(*_PAGING_FIELDS)
    if not any(paging.values.get(name) for name in ("next", "param")) and not any(paging.rest()):
        message = "paging needs 'next', a path in the body, or 'param', a query parameter"
        end.error(message, "paging", ProblemKind.MISSING_FIELD)
    paging.close(_PAGING_FIELDS)
    for name, words in (("start", "a whole number"), ("step", "a whole number or 'rows'")):
        value = paging.values.get(name)
        if is_open(value) or (name == "step" and value == "rows"):
            continue
        if isinstance(value, bool) or not str(value).strip().lstrip("-").isdigit():
            paging.error(f"{name} must be {words}, found {described(value)}", name)


def _check_written(block: Block, target: Block, kind: str) -> None:
    path = next((target[name] for name in ("path", "uri", "url") if target.values.get(name)), "")
    mode = block if _word(block, "mode") else target
    keys = [part.values.get(name) for part in (block, target) for name in ("key", "keys", "key_columns")]
    refused = refusals(
        kind,
        None if is_open(path) else str(path),
        mode=_word(mode, "mode"),
        verify=_word(block, "verify"),
        on_drift=_word(block, "on_drift") or _word(block, "on_new_column"),
        resumable=_word(block, "resumable"),
        has_key=any(keys),
    )
    for field, message in refused:
        if field == "key":
            mode.error(message, "mode", ProblemKind.MISSING_FIELD)
        else:
            {"kind": target, "mode": mode}.get(field, block).error(message, field)


def refusals(
    kind: str, path: str | None, *, mode: str, verify: str, on_drift: str, resumable: str, has_key: bool
) -> Iterator[tuple[str, str]]:
    """Yields the fields that a target cannot follow, each with the reason and the remedy.

    Args:
        path: of an object; None if it is not known yet.
    """
    if kind == "result":
        yield "kind", "a result is no target; use the artifact tool"
        return
    if kind in _WAREHOUSES:
        reason = f"{kind} is a source only: its tables do not refuse a row that is written twice"
        yield "kind", f"{reason}; write files to a bucket, and load them with a task of kind {kind}"
        return
    folder = kind == "object" and (path or "").endswith("/")
    file = kind == "object" and not folder and path is not None
    if file and mode in ("append", "upsert"):
        remedy = "; write mode: replace"
        remedy += ", or a folder (target.path: s3://lake/rows/)" if mode == "append" else ""
        yield "mode", f"mode: {mode} is not for one file, which is replaced as a whole{remedy}"
    elif folder and mode == "upsert":
        yield "mode", "mode: upsert is for tables; of a folder write append or replace"
    elif kind in ("duckdb", "mysql", "sqlite") and mode == "upsert" and not has_key:
        yield "key", f"upsert into {kind} needs 'key': its unique columns"
    if verify == "checksum" and kind == "http":
        yield "verify", "verify: checksum reads the target back, which http cannot; write verify: rows"
    elif verify == "checksum" and kind in ("mysql", "sqlite"):
        yield "verify", f"verify: checksum cannot compare the types of {kind}; write verify: rows"
    if on_drift == "add" and kind not in ("postgres", "duckdb"):
        yield "on_drift", "on_drift: add is for tables of postgres and duckdb; write error or ignore"
    if resumable == "true" and (file or kind in ("http", "mysql", "sqlite")):
        reason = "resumable: true is for postgres and duckdb targets, and folders (target.path: s3://lake/rows/)"
        yield "resumable", f"{reason}; leave it out"


def _word(block: Block, name: str) -> str:
    value = block.values.get(name)
    return "" if value is None else str(value).strip().lower()


KINDS = (
    ToolKind(
        "transfer",
        "noetl_dagster.tools.transfer.tool:TransferTool",
        {
            "source": "Where the rows come from: {kind, ...}",
            "target": "Where the rows go to: {kind, ...}",
            "mode": "append, replace, or upsert by key; default: append for tables, replace for files and objects",
            ("key", "keys", "key_columns"): "Unique columns for upsert",
            ("on_drift", "on_new_column"): "What happens with columns that the target lacks; default: error",
            "verify": "What is compared after writing: rows (default), checksum or none",
            "resumable": "Whether rows are staged, so that a restarted command continues; default: auto",
            ("chunk_size", "batch_size"): "Maximum of rows in a chunk; of a folder, rows of a part (500,000)",
        },
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
        check=_check,
    ),
)
