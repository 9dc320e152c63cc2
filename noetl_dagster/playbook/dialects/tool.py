"""Tools: every accepted shape of ``tool`` to tasks with canonical fields."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import Place
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.retry import read_retry, read_sink
from noetl_dagster.playbook.dialects.set import read_set
from noetl_dagster.playbook.dialects.spec import read_task_spec, read_timeout, selected_fields
from noetl_dagster.playbook.dialects.spelling import (
    AUTH,
    DESCRIPTION,
    HTTP_METHODS,
    INPUT,
    OUTPUT,
    TASK_KEYS,
)
from noetl_dagster.playbook.models import Input, Task
from noetl_dagster.playbook.tool_kinds import SUPPORTED_KINDS, TOOL_KINDS, Spellings, ToolKind
from noetl_dagster.playbook.wording import described, suggestion

Specs = tuple[dict[str, Any], ...]
PREVIOUS = "previous"
CODE_KINDS = frozenset({"python", "script", "shell", "spark"})
"""Tools whose scripts are code; those of others are commands."""

UNKNOWN = ToolKind(fields=())
_FORM = "application/x-www-form-urlencoded"


def read_tasks(step: Block, outer: Specs) -> tuple[Task, ...]:
    """The tasks of a step's ``tool``; ``outer`` are the specs around them, outermost first."""
    key = step.spelled("tool")
    value = None if key is None else step[key]
    if key is None or value is None:
        return ()
    place = step.place_of(key)
    if isinstance(value, list):
        tasks = _from_list(step, value, outer)
    elif isinstance(value, dict):
        tasks = _from_mapping(step, value, place, 0, outer)
    else:
        step.error(f"tool must be a mapping with 'kind' or a list of tasks, found {described(value)}", key)
        return ()
    _check_names(step, tasks)
    _check_jumps(step, tasks)
    return tuple(tasks)


def _from_list(step: Block, entries: list[Any], outer: Specs) -> list[Task]:
    if not entries:
        step.error("tool is an empty list; give at least one task {name, kind, ...}", "tool")
    tasks: list[Task] = []
    for index, entry in enumerate(entries):
        tasks += _from_mapping(step, entry, step.document.place(entries, index), index, outer)
    return tasks


def _from_mapping(step: Block, value: Any, place: Place, index: int, outer: Specs) -> list[Task]:
    """One task ``{kind, ...}``, or labelled ones ``{label: {kind, ...}}``."""
    if isinstance(value, dict) and "kind" not in value and _is_labelled(value):
        labelled = [
            (
                label,
                Block(step.reading, inner, f"{step.what}, task {label!r}", step.document.place(value, label)),
            )
            for label, inner in value.items()
        ]
        found = [read_task(block, outer, name=label) for label, block in labelled]
    else:
        block = step.reading.own_block(value, step.what, place)
        found = [] if block is None else [read_task(block, outer, default_name=f"task_{index}")]
    return [task for task in found if task is not None]


def _is_labelled(value: dict[str, Any]) -> bool:
    return bool(value) and all(isinstance(inner, dict) and "kind" in inner for inner in value.values())


def read_task(
    block: Block, outer: Specs, *, name: str | None = None, default_name: str = "task_0"
) -> Task | None:
    """One tool call.

    Args:
        name: the label it stands under; None: its own ``name``, else ``default_name``.
    """
    kind = _kind(block)
    own_name = block.text("name")
    named = name or (None if own_name is None or "{{" in own_name else own_name)
    if named is not None and repr(named) not in block.what:
        block.what = f"{block.what}, task {named!r}"
    if kind is None:
        return None
    known = TOOL_KINDS.get(kind, UNKNOWN)
    input = _input(block, kind)
    spec_block = block.child("spec")
    spec = read_task_spec(spec_block, outer, block)
    task = {
        "set": read_set(block),
        "output": block.take(*OUTPUT),
        "output_select": selected_fields(block.take("output_select") or _selected_by_spec(spec_block)),
        "auth": block.take(*AUTH) or None,
        "retry": read_retry(block),
        "sink": read_sink(block),
    }
    block.drop(*DESCRIPTION)
    config = _config(block, kind, known.fields)
    _unfold_script(block, config, kind)
    if own_name is not None and known.name_fills is not None:
        config.setdefault(known.name_fills, own_name)
    _check_required(block, kind, known, config)
    for field, words in known.words.items():
        block.check_word(field, words)
    if kind == "http":
        _check_method(block, config)
    return block.build(
        Task,
        name=named or default_name,
        kind=kind,
        named=named is not None,
        config=config,
        input=input,
        spec=spec,
        place=block.place,
        **task,
    )


def _selected_by_spec(spec: Block | None) -> Any:
    result = None if spec is None else spec.values.get("result")
    return (result.get("select") or result.get("output_select")) if isinstance(result, dict) else None


def _kind(block: Block) -> str | None:
    kind = block.text("kind")
    if kind is None:
        known = ", ".join(SUPPORTED_KINDS)
        block.error(f"a tool needs 'kind', one of {known}")
        return None
    if kind not in SUPPORTED_KINDS:
        near = suggestion(kind, SUPPORTED_KINDS, "")
        hint = near if near.startswith("did") else ""
        message = f"tool kind {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}"
        report = block.warn if block.reading.lenient else block.error
        report(f"{message}; {hint}" if hint else message, "kind")
    return kind


def _input(block: Block, kind: str) -> Input:
    """``input`` or ``args``; of a child playbook also ``payload`` and ``workload``."""
    if isinstance(block.values.get("args"), list):  # arguments of a command line, not named values
        return block.mapping("input")
    return block.input(*(*INPUT, "payload", "workload") if kind == "playbook" else INPUT)


def _config(block: Block, kind: str, fields: tuple[Spellings, ...]) -> dict[str, Any]:
    """The tool's own fields under canonical names. Fields nobody knows are kept, and pointed out."""
    config: dict[str, Any] = {}
    for names in fields:
        key = block.spelled(*names)
        if key is not None and block[key] is not None:
            config[names[0]] = block[key]
    known = tuple(names[0] for names in fields)
    if fields:
        for key in block.rest():
            near = suggestion(key, (*known, *TASK_KEYS))
            if near.startswith("did you mean"):
                place = block.document.key_place(block.values, key)
                block.document.report(place, f"{block.what}: {kind} has no field {key!r}; {near}", "warning")
    config |= block.take_rest()
    if "timeout" in config:
        config["timeout"] = _timeout(block)
    if kind == "http" and isinstance(config.get("json"), dict) and _sends_form(config.get("headers")):
        config["form"] = config.pop("json")
    return config


def _unfold_script(block: Block, config: dict[str, Any], kind: str) -> None:
    """``script: {source: {type: inline}, code}`` is the code, or the SQL, itself."""
    script = config.get("script")
    source = script.get("source") if isinstance(script, dict) else None
    type_ = source.get("type") if isinstance(source, dict) else source
    if not isinstance(script, dict) or type_ != "inline":
        return
    del config["script"]
    code = script.get("code") or (source.get("code") if isinstance(source, dict) else None)
    if code is None:
        block.error("script of source type 'inline' needs 'code'", "script")
    else:
        config.setdefault("code" if kind in CODE_KINDS else "command", code)


def _timeout(block: Block) -> Any:
    """Seconds; a template stays one, since tool fields are rendered at run time."""
    value = block["timeout"]
    return value if isinstance(value, str) and "{{" in value else read_timeout(block)


def _check_method(block: Block, config: dict[str, Any]) -> None:
    method = config.get("method")
    if isinstance(method, str) and "{{" not in method and method.upper() not in HTTP_METHODS:
        block.error(f"method {method!r} is unknown; use one of {', '.join(HTTP_METHODS)}", "method")


def _sends_form(headers: Any) -> bool:
    if not isinstance(headers, dict):
        return False
    return any(
        name.lower() == "content-type" and str(value).startswith(_FORM) for name, value in headers.items()
    )


def _check_required(block: Block, name: str, kind: ToolKind, config: dict[str, Any]) -> None:
    missing = [field for field in kind.needs if field not in config]
    if missing and (kind.needs_all or len(missing) == len(kind.needs)):
        block.error(f"{name} needs {' or '.join(map(repr, missing if kind.needs_all else kind.needs))}")


def _check_names(step: Block, tasks: list[Task]) -> None:
    seen: dict[str, Task] = {}
    for task in tasks:
        if task.name in seen:
            first = seen[task.name].place
            line = f" (first on line {first.line})" if first else ""
            place = task.place or step.place
            step.document.report(
                place, f"{step.what}: task name {task.name!r} occurs twice{line}; rename one"
            )
        seen.setdefault(task.name, task)


def _check_jumps(step: Block, tasks: list[Task]) -> None:
    names = tuple(task.name for task in tasks)
    for to, action in step.reading.jumps:
        if to != PREVIOUS and to not in names:
            hint = suggestion(to, names, "tasks of this step")
            action.error(f"jump to unknown task {to!r}; {hint}", "to")
    step.reading.jumps.clear()
