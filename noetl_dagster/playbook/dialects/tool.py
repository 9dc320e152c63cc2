"""Tools: every accepted shape of ``tool`` to tasks with canonical fields."""

from __future__ import annotations

import base64
from collections.abc import Set
from itertools import chain
from typing import Any

from noetl_dagster.errors import Place, ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.container import check_container
from noetl_dagster.playbook.dialects.literals import check_task
from noetl_dagster.playbook.dialects.retry import read_retry, read_sink
from noetl_dagster.playbook.dialects.routing import read_set
from noetl_dagster.playbook.dialects.spec import read_keeping, read_task_spec, read_timeout
from noetl_dagster.playbook.dialects.spelling import (
    DATABASE_FIELDS,
    DOCUMENTARY,
    ENCODED_FIELDS,
    HTTP_METHODS,
    INPUT,
    OUTPUT,
    SET_BLOCKS,
    SPEC_WORDS,
    TASK_KEYS,
    TASK_REMEDIES,
)
from noetl_dagster.playbook.models import Assertion, Input, Task
from noetl_dagster.playbook.tool_kinds import AUTH, SUPPORTED_KINDS, TIMEOUT, TOOL_KINDS, ToolKind
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
    known = TOOL_KINDS.get(kind or "", UNKNOWN)
    block = _lifted(block, known)
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
        "output": output,
        "auth": _auth(block, kind),
        "retry": read_retry(block),
        "sink": read_sink(block),
        "asserts": read_assertion(block),
    }
    block.drop(*DOCUMENTARY)
    if not any(names[0] == TIMEOUT[0] for names in known.fields):
        timeout = read_timeout(block)
        spec = spec.model_copy(update={"timeout": timeout}) if spec.timeout is None else spec
    config = _config(block, kind, known)
    _unfold_script(block, config, kind)
    if own_name is not None and known.name_fills is not None:
        config.setdefault(known.name_fills, own_name)
    _check_required(block, kind, known, config)
    if kind == "container":
        check_container(block)
    for field, words in known.words.items():
        block.check_word(field, words)
    if kind == "http":
        _check_method(block, config)
    check_task(block, kind)
    return block.build(
        Task,
        name=named or default_name,
        kind=kind,
        named=named is not None,
        config=config,
        input=input,
        spec=spec.model_copy(update={"result": result}),
        place=block.place,
        **task,
    )


def _lifted(block: Block, kind: ToolKind) -> Block:
    """The task with those of its fields beside ``kind`` that stand below ``spec``, or ``runtime`` of a container."""
    fields = set(chain.from_iterable((*kind.fields, kind.without_effect)))
    if not fields:
        return block
    common = {*INPUT, *AUTH, *OUTPUT, *SET_BLOCKS, "payload", "workload", "output_select", "retry", "sink"}
    if kind.name_fills is not None:
        common.add("name")
    block = _without(block, "spec", (fields | common) - SPEC_WORDS)
    return _without(block, "runtime", fields) if block.values.get("kind") == "container" else block


def _without(block: Block, key: str, movable: Set[str]) -> Block:
    """The block with the ``movable`` ones of the keys that stand below ``key`` beside it."""
    below = block.values.get(key)
    if not isinstance(below, dict) or movable.isdisjoint(below):
        return block
    moved = [name for name in below if name in movable]
    document = block.document
    for name in moved:
        if name in block and key == "spec":
            message = f"{block.what}: {name!r} stands beside 'kind' and below {key!r}; keep one"
            place = document.key_place(below, name)
            document.report(place, message, kind=ProblemKind.CONFLICTING_FIELDS)
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
        known = ", ".join(SUPPORTED_KINDS)
        block.error(f"a tool needs 'kind', one of {known}", kind=ProblemKind.MISSING_FIELD)
        return None
    if kind not in SUPPORTED_KINDS:
        near = suggestion(kind, SUPPORTED_KINDS, "")
        hint = near if near.startswith("did") else ""
        message = f"tool kind {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}"
        message = f"{block.what}: {message}; {hint}" if hint else f"{block.what}: {message}"
        block.document.report_unsupported(block.place_of("kind"), message, ProblemKind.UNSUPPORTED_KIND)
    return kind


def _input(block: Block, kind: str) -> Input:
    """``input`` or ``args``; of a child playbook also ``payload`` and ``workload``."""
    if isinstance(block.values.get("args"), list):  # arguments of a command line, not named values
        return block.mapping("input")
    return block.input(*(*INPUT, "payload", "workload") if kind == "playbook" else INPUT)


def _auth(block: Block, kind: str) -> Any:
    """``auth``; of a postgres task else ``db_host``, ``db_user`` and so on, a credential written inline."""
    auth = block.take(*AUTH) or None
    inline = [name for name in DATABASE_FIELDS if name in block] if kind == "postgres" else []
    fields = {DATABASE_FIELDS[name]: block.take(name) for name in inline}
    if auth is not None and inline:
        message = f"{inline[0]!r} has no effect beside 'auth'"
        block.warn(message, inline[0], ProblemKind.FIELD_WITHOUT_EFFECT)
    return {"type": kind, **fields} if auth is None and inline else auth


def read_assertion(block: Block) -> Assertion:
    """``assert: {expects, returns}``."""
    asserted = block.child("assert")
    if asserted is None:
        return Assertion()
    return asserted.read(Assertion) or Assertion()


def _config(block: Block, kind: str, known: ToolKind) -> dict[str, Any]:
    """Returns the tool's own fields under canonical names; those of unknown kinds as they are."""
    if known is UNKNOWN:
        return block.take_rest()
    config: dict[str, Any] = {}
    for names in known.fields:
        if names[0] == "args" and not isinstance(block.values.get("args"), list):
            continue  # a mapping is the input
        key = block.spelled(*names)
        if key is not None and block[key] is not None:
            config[names[0]] = _timeout(block, key) if names[0] == TIMEOUT[0] else block[key]
    _decode(block, known, config)
    _check_rest(block, kind, known)
    if kind == "http" and isinstance(config.get("json"), dict) and _sends_form(config.get("headers")):
        config["form"] = config.pop("json")
    return config


def _decode(block: Block, known: ToolKind, config: dict[str, Any]) -> None:
    """Code and SQL written as base64."""
    for word, name in ENCODED_FIELDS.items():
        text = block.text(word) if any(names[0] == name for names in known.fields) else None
        if text is None:
            continue
        if name in config:
            message = f"{name!r} and {word!r} mean the same; keep {name!r}"
            block.error(message, word, ProblemKind.CONFLICTING_FIELDS)
        try:
            config[name] = base64.b64decode("".join(text.split()), validate=True).decode()
        except ValueError:
            block.error(f"{word} must be text in base64", word)
            config[name] = ""


def _check_rest(block: Block, kind: str, known: ToolKind) -> None:
    """Reports the fields that the kind does not know, or that say nothing here."""
    names = (*(names[0] for names in known.fields), *TASK_KEYS)
    for key in block.rest():
        place = block.document.key_place(block.values, key)
        if key in known.without_effect or known.takes_anything:
            message = f"{block.what}: {key!r} has no effect on a task of kind {kind}"
            block.document.report(place, message, "warning", ProblemKind.FIELD_WITHOUT_EFFECT)
            continue
        remedy = TASK_REMEDIES.get(key) or suggestion(key, names, f"fields of {kind}")
        message = f"{block.what}: {kind} has no field {key!r}; {remedy}"
        block.document.report_unsupported(place, message, ProblemKind.UNKNOWN_FIELD)


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
        block.error("script of source type 'inline' needs 'code'", "script", kind=ProblemKind.MISSING_FIELD)
    else:
        config.setdefault("code" if kind in CODE_KINDS else "command", code)


def _timeout(block: Block, key: str) -> Any:
    """Seconds; a template stays one, since tool fields are rendered at run time."""
    value = block[key]
    return value if isinstance(value, str) and "{{" in value else read_timeout(block, key)


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
        wanted = " or ".join(map(repr, missing if kind.needs_all else kind.needs))
        block.error(f"{name} needs {wanted}", kind=ProblemKind.MISSING_FIELD)


def _check_names(step: Block, tasks: list[Task]) -> None:
    seen: dict[str, Task] = {}
    for task in tasks:
        if task.name in seen:
            first = seen[task.name].place
            line = f" (first on line {first.line})" if first else ""
            place = task.place or step.place
            message = f"{step.what}: task name {task.name!r} occurs twice{line}; rename one"
            step.document.report(place, message, kind=ProblemKind.DUPLICATE_NAME)
        seen.setdefault(task.name, task)


def _check_jumps(step: Block, tasks: list[Task]) -> None:
    names = tuple(task.name for task in tasks)
    for to, action in step.reading.jumps:
        if to != PREVIOUS and to not in names:
            hint = suggestion(to, names, "tasks of this step")
            action.error(f"jump to unknown task {to!r}; {hint}", "to", ProblemKind.UNKNOWN_TASK)
    step.reading.jumps.clear()
