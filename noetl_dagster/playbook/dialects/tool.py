"""Tools: every accepted shape of ``tool`` to tasks with canonical fields."""

from __future__ import annotations

import base64
from collections.abc import Set
from contextlib import suppress
from typing import Any

from noetl_dagster.errors import Place, ProblemKind, TemplateError
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.pages import read_pages
from noetl_dagster.playbook.dialects.retry import read_retry, read_sink
from noetl_dagster.playbook.dialects.routing import read_set
from noetl_dagster.playbook.dialects.spec import read_keeping, read_task_spec, read_timeout
from noetl_dagster.playbook.models import Assertion, Input, Task
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.tool_kinds import (
    AUTH,
    CHUNK_SIZE,
    DOCUMENTARY,
    INPUT,
    TIMEOUT,
    TOOL_KINDS,
    ToolKind,
    unsupported_kind,
)
from noetl_dagster.playbook.wording import described, is_open, suggestion

Specs = tuple[dict[str, Any], ...]
PREVIOUS = "previous"
UNKNOWN = ToolKind("", "", {})

_REMEDIES = {
    "case": "routes are written as next: {arcs: [{step, when}]} of the step",
    "eval": "rules are written in spec: {policy: {rules: [{when, then}]}}",
    "when": "admission is written as spec: {policy: {admit: {rules: [{when, then: {allow: true}}]}}} of the step",
    "next": "it belongs to the step; indent it as 'tool' is",
    "loop": "it belongs to the step; indent it as 'tool' is",
}
_DATABASE_FIELDS = {
    **{name: name for name in ("db_host", "db_port", "db_user", "db_password", "db_name")},
    "db_conn_string": "connection_string",
}
"""Fields of a postgres task that say how to connect -> the field of a credential."""

_ENCODED_FIELDS = {"command_b64": "command", "commands_b64": "command", "code_b64": "code"}
"""Fields that hold another one in base64."""


def read_tasks(step: Block, outer: Specs) -> tuple[Task, ...]:
    """Reads the tasks of a step's ``tool``; ``outer`` are the specs around them, outermost first."""
    value = step.take("tool")
    if value is None:
        return ()
    if isinstance(value, list):
        if not value:
            step.error("tool is an empty list; give at least one task {name, kind, ...}", "tool")
        places = [(entry, step.document.place(value, index)) for index, entry in enumerate(value)]
    elif isinstance(value, dict):
        places = [(value, step.place_of("tool"))]
    else:
        message = f"tool must be a mapping with 'kind' or a list of tasks, found {described(value)}"
        step.error(message, "tool")
        return ()
    tasks = [
        task for index, (entry, place) in enumerate(places) for task in _from_mapping(step, entry, place, index, outer)
    ]
    _check_names(step, tasks)
    return tuple(tasks)


def _from_mapping(step: Block, value: Any, place: Place, index: int, outer: Specs) -> list[Task]:
    """Reads one task ``{kind, ...}``, or labelled ones ``{label: {kind, ...}}``."""
    inside = value.values() if isinstance(value, dict) and "kind" not in value else ()
    if inside and all(isinstance(inner, dict) and "kind" in inner for inner in inside):
        tasks = []
        for label, inner in value.items():
            place = step.document.place(value, label)
            block = Block(step.reading, inner, f"{step.what}, task {label!r}", place)
            tasks.append(read_task(block, outer, name=label))
    else:
        only = step.reading.block(value, step.what, place)
        tasks = [] if only is None else [read_task(only, outer, default_name=f"task_{index}")]
    return [task for task in tasks if task is not None]


def read_task(block: Block, outer: Specs, *, name: str | None = None, default_name: str = "task_0") -> Task | None:
    """Reads one tool call; its name is its label (``name``), else its own ``name``, else ``default_name``."""
    kind = _kind(block)
    tool = TOOL_KINDS.get(kind or "", UNKNOWN)
    for key, movable in tool.liftable.items():
        block = _without(block, key, movable)
    block.drop("kind")
    own_name = block.text("name")
    named = name or (None if own_name is None or "{{" in own_name else own_name)
    if named is not None and repr(named) not in block.what:
        block.what = f"{block.what}, task {named!r}"
    if kind is None:
        return None
    input = _input(block, kind)
    spec = read_task_spec(block.child("spec"), outer, block)
    output, result = read_keeping(block, spec.result)
    task = {
        "set": read_set(block),
        "auth": _auth(block, kind),
        "retry": read_retry(block),
        "sink": read_sink(block),
        "asserts": block.nested(Assertion, "assert"),
    }
    block.drop(*DOCUMENTARY)
    if TIMEOUT[0] not in tool.spellings:
        timeout = read_timeout(block)
        spec = spec.model_copy(update={"timeout": timeout}) if spec.timeout is None else spec
    config = _config(block, kind, tool)
    if "pages" in config and (rule := read_pages(block, config)) is not None:
        if any(one.continues_success for one in task["retry"]):
            block.conflict("'pages' and a rule of 'retry' both say how the next page is found; keep one", "pages")
        task["retry"] = (rule, *task["retry"])
    _unfold_script(block, config, tool)
    for field in tool.commands:
        block.document.add_commands(config.get(field))
    if own_name is not None and tool.name_fills is not None:
        config.setdefault(tool.name_fills, own_name)
    missing = [field for field in tool.needs if field not in config]
    if missing and (tool.needs_all or len(missing) == len(tool.needs)):
        wanted = " or ".join(map(repr, missing if tool.needs_all else tool.needs))
        block.missing(f"{kind} needs {wanted}")
    for field, words in tool.words.items():
        block.check_word(block.present(*tool.spellings[field]) or field, words)
    if CHUNK_SIZE[0] in tool.spellings:
        _check_size(block, tool.spellings[CHUNK_SIZE[0]])
    if tool.check is not None:
        tool.check(block, config)
    return block.build(
        Task,
        name=named or default_name,
        kind=kind,
        named=named is not None,
        config=config,
        input=input,
        output=output,
        spec=spec.model_copy(update={"result": result}),
        place=block.place,
        **task,
    )


def _without(block: Block, key: str, movable: Set[str]) -> Block:
    """Returns the block with the ``movable`` keys below ``key`` moved beside it."""
    below = block.values.get(key)
    if not isinstance(below, dict) or movable.isdisjoint(below):
        return block
    moved = [name for name in below if name in movable]
    document = block.document
    for name in moved:
        if name in block and key == "spec":
            message = f"{block.what}: {name!r} stands beside 'kind' and below {key!r}; keep one"
            document.report(document.key_place(below, name), message, kind=ProblemKind.CONFLICTING_FIELDS)
    beside = [(block.values, name, name) for name in block.values]
    added = [(below, name, name) for name in moved if name not in block]
    values = document.gathered([*beside, *added])
    for name in moved:
        outer = block.values.get(name)
        if isinstance(outer, dict) and isinstance(below[name], dict):
            both = dict.fromkeys(below[name], below[name]) | dict.fromkeys(outer, outer)
            values[name] = document.gathered((where, key, key) for key, where in both.items())
    values[key] = document.gathered((below, name, name) for name in below if name not in moved)
    if not values[key] and key != "spec":
        del values[key]
    return Block(block.reading, values, block.what, block.place)


def _kind(block: Block) -> str | None:
    kind = block.text("kind")
    if kind is None:
        block.missing(f"a tool needs 'kind', one of {', '.join(TOOL_KINDS)}")
    elif kind not in TOOL_KINDS:
        message = f"{block.what}: {unsupported_kind(kind)}"
        block.document.report(block.place_of("kind"), message, kind=ProblemKind.UNSUPPORTED_KIND)
    return kind


def _input(block: Block, kind: str) -> Input:
    """Reads ``input`` or ``args``; of a child playbook also ``payload`` and ``workload``."""
    if isinstance(block.values.get("args"), list):  # arguments of a command line, not named values
        return block.mapping("input")
    return block.input(*(*INPUT, "payload", "workload") if kind == "playbook" else INPUT)


def _auth(block: Block, kind: str) -> Any:
    """Reads ``auth``, or ``db_host``, ``db_user`` and so on of a postgres task as an inline credential."""
    auth = block.take(*AUTH) or None
    inline = [name for name in _DATABASE_FIELDS if name in block] if kind == "postgres" else []
    fields = {_DATABASE_FIELDS[name]: block.take(name) for name in inline}
    if auth is not None and inline:
        message = f"{inline[0]!r} has no effect beside 'auth'"
        block.warn(message, inline[0], ProblemKind.FIELD_WITHOUT_EFFECT)
    return {"type": kind, **fields} if auth is None and inline else auth


def _config(block: Block, kind: str, tool: ToolKind) -> dict[str, Any]:
    """Returns the tool's own fields under canonical names; those of unknown kinds as they are."""
    if tool is UNKNOWN:
        return block.take_rest()
    config: dict[str, Any] = {}
    if kind == "playbook" and {"path", "task"} <= block.values.keys():
        block.warn("'task' has no effect beside 'path'", "task", ProblemKind.FIELD_WITHOUT_EFFECT)
        block.values = block.document.gathered((block.values, key, key) for key in block.values if key != "task")
    for names in tool.spellings.values():
        if names[0] == "args" and not isinstance(block.values.get("args"), list):
            continue  # a mapping is the input
        value = block.take(*names)
        if value is None:
            continue
        if names[0] == TIMEOUT[0] and not (isinstance(value, str) and "{{" in value):
            value = read_timeout(block, *names)  # a template stays one: tool fields are rendered at run time
        config[names[0]] = value
    _decode(block, tool, config)
    _check_rest(block, kind, tool)
    return config


def _decode(block: Block, tool: ToolKind, config: dict[str, Any]) -> None:
    """Decodes code and SQL written as base64."""
    for word, name in _ENCODED_FIELDS.items():
        text = block.text(word) if name in tool.spellings else None
        if text is None:
            continue
        if name in config:
            block.conflict(f"{name!r} and {word!r} mean the same; keep {name!r}", word)
        try:
            config[name] = base64.b64decode("".join(text.split()), validate=True).decode()
        except ValueError:
            block.error(f"{word} must be text in base64", word)
            config[name] = ""


def _check_rest(block: Block, kind: str, tool: ToolKind) -> None:
    names = tuple(dict.fromkeys((*tool.spellings, *block.asked)))
    for key in block.rest():
        if key in tool.without_effect or tool.takes_anything:
            message = f"{key!r} has no effect on a task of kind {kind}"
            block.report_key(key, message, ProblemKind.FIELD_WITHOUT_EFFECT, "warning")
            continue
        remedy = _REMEDIES.get(key) or suggestion(key, names, f"fields of {kind}")
        block.report_key(key, f"{kind} has no field {key!r}; {remedy}", ProblemKind.UNKNOWN_FIELD)


def _unfold_script(block: Block, config: dict[str, Any], tool: ToolKind) -> None:
    """Replaces ``script: {source: {type: inline}, code}`` by the code or SQL itself, or a template by its value."""
    script = config.get("script")
    source = script.get("source") if isinstance(script, dict) else None
    inline = source if isinstance(source, dict) else {"type": source}
    if not isinstance(script, dict) or inline.get("type") != "inline":
        return
    del config["script"]
    code = script.get("code") or inline.get("code")
    if code is None:
        block.error("script of source type 'inline' needs 'code'", "script", kind=ProblemKind.MISSING_FIELD)
    else:
        if "code" in tool.spellings and isinstance(code, str):
            with suppress(TemplateError):  # no template, or one that needs more than the workload
                code = str(block.rendered(code)) if compile_value(code).is_expression else code
        config.setdefault("code" if "code" in tool.spellings else "command", code)


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


def _check_names(step: Block, tasks: list[Task]) -> None:
    """Reports names that occur twice, and jumps to tasks that the step does not have."""
    first: dict[str, Task] = {}
    for task in tasks:
        if task.name in first:
            place = first[task.name].place
            line = f" (first on line {place.line})" if place else ""
            message = f"{step.what}: task name {task.name!r} occurs twice{line}; rename one"
            step.document.report(task.place or step.place, message, kind=ProblemKind.DUPLICATE_NAME)
        first.setdefault(task.name, task)
    for to, action in step.reading.jumps:
        if to != PREVIOUS and to not in first:
            hint = suggestion(to, tuple(first), "tasks of this step")
            action.error(f"jump to unknown task {to!r}; {hint}", "to", ProblemKind.UNKNOWN_TASK)
    step.reading.jumps.clear()
