"""Reads the blocks of older playbooks: ``retry`` with ``next_call`` and ``collect``, and ``sink``."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ERROR_KINDS, ProblemKind, TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.fields import declarations
from noetl_dagster.playbook.models import Backoff, Collect, RetryRule, Sink
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.tool_kinds import AUTH, ON_NEW_COLUMN, TOOL_KINDS
from noetl_dagster.playbook.wording import described, is_template, suggestion

_ON_ERROR = "error is defined"
_POLLED = frozenset({"output", "response", "result"})
"""Names of results: a ``stop_when`` that reads one polls until it holds."""

_ERROR_WORDS = {
    "connection_error": "connection",
    "timeout_error": "timeout",
    "4xx": "client_error",
    "5xx": "server_error",
}
_SHAPE = "a retry rule is {when, then: {max_attempts, ...}}"
_LIMITS = ("max_attempts", "delay", "backoff")
_FLAT = (
    *(name for field in declarations(RetryRule) for name in field.spellings if field.name in _LIMITS),
    *("backoff_multiplier", "retry_on", "retry_on_status", "stop_when"),
)
SINK_TOOL = "postgres"
_SINK_TOOLS = {
    "postgres": ("table", "mode", "key", "on_new_column", "command"),
    "mysql": ("table", "mode", "key", "on_new_column"),
    **dict.fromkeys(("duckdb", "sqlite"), ("table", "mode", "key", "on_new_column", "database")),
    **dict.fromkeys(("file", "s3", "minio", "gcs"), ("path", "format")),
}
"""By tool, what a sink says beside ``auth`` and ``args``."""

_SINKS_OF_TABLES = frozenset({"duckdb", "mysql", "sqlite"})
"""Sinks that stage parts of a table."""

_WIDENED = ("postgres", "duckdb")
"""Sinks that can add columns to their table."""

_SINK_MODES = ("append", "replace", "upsert")
_SINK_FORMATS = ("parquet", "jsonl", "ndjson")


def read_retry(block: Block) -> tuple[RetryRule, ...]:
    """Reads the rules of a step's or tool's ``retry``; ``true`` and a number of attempts are short for one."""
    value = block.take("retry")
    if value is None or value is False:
        return ()
    if isinstance(value, int):
        attempts = {} if value is True else {"max_attempts": block.whole("retry")}
        always = block.build(RetryRule, when=f"{{{{ {_ON_ERROR} }}}}", **attempts)
        return () if always is None else (always,)
    rules = [_rule(rule) for rule in block.blocks("retry", f"{block.what}, retry rule")]
    return tuple(rule for rule in rules if rule is not None)


def _rule(block: Block) -> RetryRule | None:
    if "then" not in block and any(name in block for name in _FLAT):
        return _flat_rule(block)
    when = block.take("when")
    if when is None or isinstance(when, (dict, list)):
        block.error(f"when must be a template or a boolean, found {described(when)}; {_SHAPE}")
        return None
    then = block.child("then")
    block.close()
    if then is None and "then" not in block:
        block.missing(f"'then' is missing; {_SHAPE}")
    return None if then is None else _limits(then, when)


def _flat_rule(block: Block) -> RetryRule | None:
    """Reads ``{max_attempts, retry_on, retry_on_status, ...}``: the reasons are beside the limits."""
    reasons = _reasons(block)
    conditions = [" or ".join(reasons)] if reasons else []
    when, stop = block.spelled("when", "retry_when"), block.spelled("stop_when")
    if when is not None and stop is None and not reasons:
        return _limits(block, block[when])
    if when is not None:
        conditions.append(expression(block, when))
    if stop is not None:
        stopped = expression(block, stop)
        if not conditions and not _POLLED & compile_value(f"{{{{ {stopped} }}}}").names:
            conditions.append(_ON_ERROR)  # else it would try again what went well
        conditions.append(f"not ({stopped})")
    joined = " and ".join(f"({condition})" for condition in conditions) or _ON_ERROR
    return _limits(block, f"{{{{ {joined} }}}}")


def _reasons(block: Block) -> list[str]:
    """Reads ``retry_on`` (statuses and kinds of errors, including names of tools) and ``retry_on_status``."""
    kinds: list[str] = []
    numbers: list[Any] = []
    for entry in block.items("retry_on"):
        if isinstance(entry, int):
            numbers.append(entry)
            continue
        word = str(entry).strip().lower()
        kinds.append(_ERROR_WORDS.get(word, word))
        if kinds[-1] not in ERROR_KINDS and kinds[-1] not in TOOL_KINDS:
            hint = suggestion(kinds[-1], (*ERROR_KINDS, *TOOL_KINDS), "kinds of errors")
            block.error(f"retry_on: no error is of kind {kinds[-1]!r}; {hint}", "retry_on")
    statuses = []
    for status in (*numbers, *block.items("retry_on_status")):
        if isinstance(status, bool) or not str(status).strip().isdigit():
            block.error(f"retry_on_status: {described(status)} is no status such as 503", "retry_on_status")
        else:
            statuses.append(int(status))
    reasons = [f"error.kind in {kinds}"] if kinds else []
    return [*reasons, f"error.status in {statuses}"] if statuses else reasons


def expression(block: Block, key: str) -> str:
    """Reads one template; returns what is inside of its braces."""
    text = str(block[key]).strip()
    try:
        is_expression = compile_value(text).is_expression
    except TemplateError as error:
        block.error(f"{key}: {error}", key, ProblemKind.TEMPLATE_SYNTAX)
        return "false"
    if not is_expression:
        block.error(f"{key} must be one template: {{{{ ... }}}}", key)
        return "false"
    return text[2:-2].strip(" -+")


def _limits(then: Block, when: str | bool) -> RetryRule | None:
    then = then.with_constant_delay()
    multiplier = then.number("backoff_multiplier")
    then.drop("jitter")  # there always is some
    collect = then.child("collect")
    if collect is not None and collect.spelled("into") is not None:
        collect.warn("'into' is not needed: what was collected is the result of the step", "into")
    rule = then.read(
        RetryRule,
        when=when if isinstance(when, bool) else str(when),
        collect=None if collect is None else collect.read(Collect),
        sink=read_sink(then),
    )
    if rule is not None and "backoff" not in then and multiplier is not None and multiplier > 1:
        return rule.model_copy(update={"backoff": Backoff.EXPONENTIAL})
    return rule


def read_sink(owner: Block) -> Sink | None:
    """Reads ``sink: {tool, table, auth, mode}``; ``tool`` may itself be a mapping with ``kind``."""
    block = owner.child("sink")
    if block is None:
        return None
    if isinstance(block.values.get("tool"), dict):
        tool = block.child("tool")
        assert tool is not None
        parts = [part.fields(Sink, tool=part.text("kind"), auth=_credential(part)) for part in (tool, block)]
        tool.close()
    else:
        parts = [block.fields(Sink, tool=block.text("tool", "kind"), auth=_credential(block))]
    block.close()
    fields = {name: value for part in parts for name, value in part.items() if value not in (None, (), {})}
    _check_sink(block, fields)
    return block.build(Sink, **fields)


def _check_sink(block: Block, values: dict[str, Any]) -> None:
    tool = values.get("tool", SINK_TOOL)
    if tool not in _SINK_TOOLS:
        hint = suggestion(tool, tuple(_SINK_TOOLS), "use one of")
        remedy = f"{hint}, or a task of kind {tool} after this one"
        block.error(f"a sink of tool {tool!r} is not supported; {remedy}", "tool")
        return
    needed = ("table", "command") if tool == SINK_TOOL else ("table",) if tool in _SINKS_OF_TABLES else ("path",)
    if not any(values.get(name) for name in needed):
        of_postgres = "a sink needs 'table', or 'command' with SQL"
        block.error(of_postgres if tool == SINK_TOOL else f"a sink of tool {tool} needs {needed[0]!r}")
    if "database" in _SINK_TOOLS[tool] and not values.get("database"):
        block.error(f"a sink of tool {tool} needs 'database', the file that the table is in")
    for name in values.keys() - {"tool", "auth", "args", *_SINK_TOOLS[tool]}:
        block.error(f"a sink of tool {tool} has no {name!r}; it has {', '.join(_SINK_TOOLS[tool])}", name)
    for name, words in (("mode", _SINK_MODES), ("format", _SINK_FORMATS), ("on_new_column", ON_NEW_COLUMN)):
        value = values.get(name)
        if value is not None and not is_template(value) and value not in words:
            block.error(f"{name} is {value!r}; use one of {', '.join(words)}", name)
    if values.get("on_new_column") is not None and values.get("command"):
        block.error("on_new_column is for 'table'; 'command' names its columns itself", "on_new_column")
    if values.get("on_new_column") == "add" and tool not in _WIDENED:
        message = (
            f"on_new_column: add is for {' and '.join(_WIDENED)}; write ignore or fail, or add the column yourself"
        )
        block.error(message, "on_new_column")
    if tool in _SINKS_OF_TABLES and values.get("mode") == "upsert" and not values.get("key"):
        block.error(f"upsert into {tool} needs 'key', the columns that tell rows apart", "mode")


def _credential(block: Block) -> str | None:
    """Reads a credential by name, or by ``{type, credential}``."""
    value = block.take(*AUTH)
    if not isinstance(value, dict):
        return None if value is None else str(value)
    auth = block.child(*AUTH)
    assert auth is not None
    name = auth.text("credential", "name", "key")
    auth.drop("type", "kind")
    auth.close()
    return name
