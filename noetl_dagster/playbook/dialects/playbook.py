"""The root of a playbook: from a YAML document in any accepted spelling to the canonical model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from noetl_dagster.errors import Place, ProblemKind
from noetl_dagster.playbook.assets import DagsterSpec
from noetl_dagster.playbook.dialects.block import Block, ReadContext
from noetl_dagster.playbook.dialects.dagster import read_dagster
from noetl_dagster.playbook.dialects.pod import read_pod
from noetl_dagster.playbook.dialects.retry import read_sink
from noetl_dagster.playbook.dialects.routing import streaming_arcs
from noetl_dagster.playbook.dialects.spec import STEP_SPEC, check_step_spec, layered
from noetl_dagster.playbook.dialects.step import read_step
from noetl_dagster.playbook.dialects.tool import read_task, read_tasks
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.models import Assertion, Metadata, Playbook, Step, Task, Tracing
from noetl_dagster.playbook.tool_kinds import (
    API_VERSION,
    DEFAULTS,
    DESCRIPTION,
    DOCUMENTARY,
    KIND,
    METADATA_KEYS,
    SECRET_PROVIDERS,
)
from noetl_dagster.playbook.wording import described

_REMEDIES = {
    **{key: f"write it in metadata: {key}" for key in ("name", "path", "version", "description")},
    **dict.fromkeys(("vars", "ctx"), "put inputs into workload; steps write to ctx with set"),
    "steps": "the list of steps is called 'workflow'",
}


def normalise(
    document: Document,
    source: str,
    *,
    workload: Mapping[str, Any] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    only: str | None = None,
) -> Playbook | None:
    """Returns the canonical playbook, None if there is too little to build one. Problems go to ``document``.

    Args:
        workload: what an execution was started with; settings that are templates are settled from it.
        settings: of a step that is entered, its settings that are templates, rendered.
        only: the name of that step; no other is read.
    """
    reading = ReadContext(document)
    reading.rendered = settings
    if document.root is None:
        if not document.problems:
            message = f"the file is empty; a playbook starts with apiVersion: {API_VERSION}"
            document.report(document.start, message)
        return None
    root = reading.block(document.root, "playbook", document.start)
    if root is None:
        return None
    _check_header(root)
    defaults = root.mapping("workload")
    reading.workload = {**defaults, **workload}
    executor = root.mapping("executor")
    _specs_of_all_steps(root, executor)
    if only is None:
        _check_executor(root, executor)
    metadata = _metadata(root, document.file)
    if metadata is not None:
        reading.metadata = metadata.model_dump()
    dagster = read_dagster(root)
    foreign = _leave_out_foreign_pool(root, dagster)
    keychain, workbook = _keychain(root), _workbook(root)
    steps = _workflow(root, only)
    tracing, strict = _tracing(root), root.flag("strict")
    if foreign is not None and only is None and not any(step.wants_workers for step in steps):
        message = f"executor: pool {reading.worker_pool!r} has no effect: it is none of dagster.pools"
        document.report(foreign, message, "warning", ProblemKind.FIELD_WITHOUT_EFFECT)
    root.close(remedies=_REMEDIES)
    if metadata is None or not steps:
        return None
    return root.build(
        Playbook,
        metadata=metadata,
        steps=steps,
        workload=defaults,
        keychain=keychain,
        workbook=workbook,
        pod=reading.run_pod,
        dagster=dagster,
        tracing=tracing,
        strict=strict,
        settled=reading.settled,
        source=source,
        file=document.file,
    )


def _tracing(root: Block) -> Tracing | None:
    """Reads ``tracing: {enabled, sampling, endpoint, service_name}``; ``tracing: false`` is short for the first."""
    if isinstance(root.values.get("tracing"), bool):
        return Tracing(enabled=root.flag("tracing"))
    return root.nested(Tracing, "tracing")


def _check_header(root: Block) -> None:
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = root.text(key)
        if value is None:
            root.missing(f"'{key}' is missing; write {key}: {expected}")
        elif value != expected:
            root.error(f"{key} is {value!r}, expected {expected}", key)


def _specs_of_all_steps(root: Block, executor: dict[str, Any]) -> None:
    """Reads the outermost layers of every spec: ``spec``, and over it ``executor.spec``."""
    reading, document = root.reading, root.document
    defaults = root.child("spec", expected="spec must be a mapping such as {timeout: 5m, on_error: continue}")
    if defaults is not None:
        reading.all_steps = defaults.values
        reading.outer = dict.fromkeys(defaults.values, defaults.what)
        defaults.drop(*DEFAULTS)
        remedies = dict.fromkeys(STEP_SPEC, "write it in executor: {spec: {...}}")
        defaults.close(DEFAULTS, remedies=remedies, free=True)
    own = executor.get("spec")
    if isinstance(own, dict):
        reading.outer = {**reading.outer, **dict.fromkeys(own, "executor, spec")}
        reading.all_steps = layered(document, reading.all_steps, own)
        # steps inherit nothing else of ``kubernetes``
        reading.run_pod = read_pod(Block(reading, own, "executor, spec", document.place(executor, "spec")))


def _check_executor(root: Block, executor: dict[str, Any]) -> None:
    """Warns of keys of ``spec`` that are written beside it, and of unknown keys in it."""
    place = root.document.place(root.values, "executor")
    block = Block(root.reading, executor, "executor", place)
    for key in sorted(executor.keys() & set(STEP_SPEC)):
        message = f"{key!r} has no effect here; write spec: {{{key}: ...}}"
        block.warn(message, key, ProblemKind.FIELD_WITHOUT_EFFECT)
    if isinstance(executor.get("spec"), dict):
        check_step_spec(Block(root.reading, executor["spec"], "executor, spec", place), free=True)


def _leave_out_foreign_pool(root: Block, dagster: DagsterSpec | None) -> Place | None:
    """Moves a pool that is none of Dagster's from the executor's spec to the workers' pool; returns its place."""
    reading = root.reading
    pool = reading.all_steps.get("pool")
    if pool is None or (dagster is not None and pool in dagster.pools):
        return None
    place = root.document.key_place(reading.all_steps, "pool")
    reading.worker_pool = str(pool)
    others = ((reading.all_steps, key, key) for key in reading.all_steps if key != "pool")
    reading.all_steps = root.document.gathered(others)
    return place


def _metadata(root: Block, file: str) -> Metadata | None:
    block = root.child("metadata")
    stem = PurePath(file).stem.strip("<>")
    if block is None:
        if "metadata" not in root:
            message = f"'metadata' is missing; the playbook is called {stem!r} after its file"
            root.warn(message, kind=ProblemKind.MISSING_FIELD)
        return Metadata(name=stem, path=stem)
    name = block.text("name")
    path = block.text("path")
    if path is None and name is not None:
        message = f"'path' is missing; the playbook's path is its name, {name!r}"
        block.warn(message, kind=ProblemKind.MISSING_FIELD)
    metadata = block.build(
        Metadata,
        name=name or (PurePath(path).name if path else stem),
        path=path or name or stem,
        version=block.text("version"),
        description=block.text(*reversed(DESCRIPTION)),
        tags=_words(block, "tags"),
        owners=_words(block, "owners", "owner"),
    )
    for short in ("schedule", "partitions"):  # for dagster: {schedules, partitions}
        block.spelled(short)
    if name is None:
        message = f"'name' is missing; the playbook is called {(path or stem)!r}"
        block.warn(message, kind=ProblemKind.MISSING_FIELD)
    block.drop(*DOCUMENTARY)
    block.close(METADATA_KEYS, free=True)
    return metadata


def _words(block: Block, *names: str) -> tuple[str, ...]:
    """Reads a list of words, a text of words with commas, or a mapping (its keys and values)."""
    value = block.take(*names)
    match value:
        case None:
            return ()
        case dict():
            return tuple(f"{word}:{item}" for word, item in value.items())
        case str():
            return tuple(word.strip() for word in value.split(",") if word.strip())
        case list():
            return tuple(str(word) for word in value)
    return (str(value),)


def _entries(root: Block, key: str, shape: str) -> Iterator[tuple[str | None, Block]]:
    """Yields the mappings of a list, or those of a mapping with their names; reports everything else."""
    value = root.take(key)
    if isinstance(value, dict):
        tasks = value.get("tasks") if key == "workbook" and len(value) == 1 else None
        value = tasks if isinstance(tasks, dict) else value
        items = [(name, entry, f"{key} entry {name!r}", name) for name, entry in value.items()]
    elif isinstance(value, list):
        items = [(None, entry, f"{key} entry {index + 1}", index) for index, entry in enumerate(value)]
    else:
        items = []
        if value is not None:
            root.error(f"{key} must be a list of {shape}, found {described(value)}", key)
    for name, entry, what, at in items:
        block = root.reading.block(entry, what, root.document.place(value, at))
        if block is not None:
            yield name, block


def _keychain(root: Block) -> tuple[dict[str, Any], ...]:
    """Reads a list of ``{name, kind, ...}``, or a mapping of names to the rest."""
    entries = []
    for name, block in _entries(root, "keychain", "{name, kind, ...}"):
        if name is None and block.text("name") is None:
            block.missing("a keychain entry needs 'name'")
            continue
        if isinstance(block.values.get("map"), dict):  # else it asks for a token, and a provider says nothing
            block.check_word("provider", tuple(chain.from_iterable(SECRET_PROVIDERS)))
        entries.append(block.values if name is None else {"name": name, **block.values})
    return tuple(entries)


def _workbook(root: Block) -> dict[str, Task]:
    """Reads a list of ``{name, tool}`` or ``{name, kind, ...}``, or a mapping of names to tools."""
    tasks: dict[str, Task] = {}
    for label, block in _entries(root, "workbook", "{name, tool}"):
        task = _workbook_task(block, label)
        if task is None:
            continue
        if task.name in tasks:
            message = f"workbook name {task.name!r} occurs twice; rename one"
            block.error(message, kind=ProblemKind.DUPLICATE_NAME)
        tasks[task.name] = task
    return tasks


def _workbook_task(block: Block, label: str | None) -> Task | None:
    name = label or block.values.get("name") or block.values.get("task")
    if not isinstance(name, str):
        block.missing("a workbook entry needs 'name'")
        return None
    block.what = f"workbook task {name!r}"
    block.reading.templates = {}
    if "tool" not in block:
        block.drop("task")
        task = read_task(block, (), name=name)
        return None if task is None else task.model_copy(update={"settings": block.reading.templates})
    block.drop("name", "task", *DOCUMENTARY)
    tasks = read_tasks(block, ())
    sink, asserts = read_sink(block), block.nested(Assertion, "assert")
    block.close()
    if len(tasks) > 1:
        block.error("a workbook entry holds one tool; make a playbook of several", "tool")
    if not tasks:
        return None
    own = {"sink": tasks[0].sink or sink, "asserts": asserts or tasks[0].asserts}
    settings = block.reading.templates
    return tasks[0].model_copy(update={"name": name, "named": True, "settings": settings, **own})


def _workflow(root: Block, only: str | None) -> tuple[Step, ...]:
    value = root.take("workflow")
    if "workflow" not in root:
        root.missing("'workflow' is missing; it is the list of steps")
        return ()
    if not isinstance(value, list) or not value:
        root.error(f"workflow must be a list of steps, found {described(value or None)}", "workflow")
        return ()
    root.reading.fed = frozenset(str(arc.get("step")) for step in value for arc in streaming_arcs(step))
    steps: dict[str, Step] = {}
    for block in root.blocks("workflow", "step"):
        if only is not None and block.values.get("step") != only:
            continue
        step = read_step(block)
        if step is None:
            continue
        if step.name in steps:
            first = steps[step.name].place
            line = f" (first on line {first.line})" if first else ""
            message = f"step name {step.name!r} occurs twice{line}; rename one"
            block.error(message, "step", ProblemKind.DUPLICATE_NAME)
            continue
        steps[step.name] = step
    return tuple(steps.values())
