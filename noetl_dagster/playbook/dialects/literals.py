"""Checks the literal fields of tasks; templates are known only when the task runs."""

from __future__ import annotations

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook import tool_kinds
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.container import check_container
from noetl_dagster.playbook.wording import described, is_open, is_template


def check_task(block: Block, kind: str) -> None:
    """Reports what is wrong with the fields of a task."""
    values = block.values
    for names in tool_kinds.TOOL_KINDS[kind].fields if kind in tool_kinds.TOOL_KINDS else ():
        if names[0] == tool_kinds.CHUNK_SIZE[0]:
            _check_size(block, names)
    if kind == "container":
        check_container(block)
    elif kind == "postgres" and isinstance(values.get("key"), (list, dict)):
        remedy = "name one whose values are unique and never null, or make one of several in the SQL"
        block.error(f"key must be the name of one column, found {described(values['key'])}; {remedy}", "key")
    elif kind == "nats" and values.get("operation") == "subscribe":
        if not any(values.get(name) for name in ("stream", "subject")):
            block.error("subscribe needs 'stream' or 'subject'", "operation", ProblemKind.MISSING_FIELD)
    elif kind == "transfer":
        _check_transfer(block)


def _check_size(block: Block, names: tuple[str, ...]) -> None:
    key = next((name for name in names if block.values.get(name) is not None), None)
    if key is None or is_open(block[key]):
        return
    try:
        if isinstance(block[key], bool) or int(block[key]) < 0:
            raise ValueError
    except (TypeError, ValueError):
        message = f"{key} must be a number of rows, 1 or more, found {described(block[key])}"
        block.error(f"{message}; leave it out for the usual size", key)


def _check_transfer(block: Block) -> None:
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
    given = tool_kinds.likely_place(end.values) if key is None else end[key]
    if is_open(given):
        return None
    kind = tool_kinds.PLACE_KINDS.get(str(given).lower())
    if kind is None:
        if key is not None:
            end.check_word(key, tuple(tool_kinds.PLACE_KINDS))
        return None
    known = (*tool_kinds.PLACE_FIELDS, *(tool_kinds.REQUEST_FIELDS if kind == "http" else ("uri", "url")))
    end.drop(*known, *(name for name in end.values if is_template(str(name))))
    end.close(known)
    end.check_word("format", tool_kinds.ROW_FORMATS)
    paging = None if is_open(end.values.get("paging")) else end.child("paging")
    if paging is not None:
        _check_paging(end, paging)
    return kind


def _check_paging(end: Block, paging: Block) -> None:
    paging.drop(*tool_kinds.PAGING_FIELDS)
    if not any(paging.values.get(name) for name in ("next", "param")) and not any(paging.rest()):
        message = "paging needs 'next', a path in the body, or 'param', a query parameter"
        end.error(message, "paging", ProblemKind.MISSING_FIELD)
    paging.close(tool_kinds.PAGING_FIELDS)
    for name, words in (("start", "a whole number"), ("step", "a whole number or 'rows'")):
        given = paging.values.get(name)
        if is_open(given) or (name == "step" and given == "rows"):
            continue
        if isinstance(given, bool) or not str(given).strip().lstrip("-").isdigit():
            paging.error(f"{name} must be {words}, found {described(given)}", name)


def _check_written(block: Block, target: Block, kind: str) -> None:
    if kind == "result":
        target.error("a result is no target; use the artifact tool", "kind")
        return
    if kind in tool_kinds.WAREHOUSES:
        message = f"{kind} is a source only: its tables do not refuse a row that is written twice"
        target.error(f"{message}; write files to a bucket, and load them with a task of kind {kind}", "kind")
        return
    path = next((target[name] for name in ("path", "uri", "url") if target.values.get(name)), "")
    folder = kind == "object" and str(path).endswith("/")
    file = kind == "object" and not folder and not is_open(path)
    holder = block if _word(block, "mode") else target
    mode = _word(holder, "mode")
    keys = [one.values.get(name) for one in (block, target) for name in ("key", "keys", "key_columns")]
    if file and mode in ("append", "upsert"):
        remedy = "; write mode: replace"
        remedy += ", or a folder (target.path: s3://lake/rows/)" if mode == "append" else ""
        holder.error(f"mode: {mode} is not for one file, which is replaced as a whole{remedy}", "mode")
    elif folder and mode == "upsert":
        holder.error("mode: upsert is for tables; of a folder write append or replace", "mode")
    elif kind in ("duckdb", "mysql", "sqlite") and mode == "upsert" and not any(keys):
        holder.error(f"upsert into {kind} needs 'key': its unique columns", "mode", ProblemKind.MISSING_FIELD)
    if _word(block, "verify") == "checksum" and kind == "http":
        message = "verify: checksum reads the target back, which http cannot; write verify: rows"
        block.error(message, "verify")
    elif _word(block, "verify") == "checksum" and kind in ("mysql", "sqlite"):
        block.error(f"verify: checksum cannot compare the types of {kind}; write verify: rows", "verify")
    if "add" in (_word(block, "on_drift"), _word(block, "on_new_column")) and kind not in ("postgres", "duckdb"):
        block.error("on_drift: add is for tables of postgres and duckdb; write error or ignore", "on_drift")
    if _word(block, "resumable") == "true" and (file or kind in ("http", "mysql", "sqlite")):
        message = "resumable: true is for postgres and duckdb targets, and folders (target.path: s3://lake/rows/)"
        block.error(f"{message}; leave it out", "resumable")


def _word(block: Block, name: str) -> str:
    value = block.values.get(name)
    return "" if value is None else str(value).strip().lower()
