"""Checks streams, which arcs ``on: call.partial`` form: their shape, and the names that templates read of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError

from noetl_dagster.errors import Problem, ProblemKind, TemplateError
from noetl_dagster.playbook.checks.templates import texts_in
from noetl_dagster.playbook.dialects.spelling import WHEN
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import CALL_PARTIAL, Arc, LoopMode, Playbook, Step
from noetl_dagster.playbook.templates.chunks import CHUNK_NAMES
from noetl_dagster.playbook.templates.rendering import Condition, compile_value, condition, paths_in
from noetl_dagster.playbook.wording import suggestion

_OF_MAPPINGS = frozenset({"get", "items", "keys", "values"})


def check_streams(playbook: Playbook, document: Document) -> Iterator[Problem]:
    """A stream has one source for each step that takes it, and its steps are joined by nothing else."""
    yield from _check_names(playbook, document)
    graph = StepGraph(playbook)
    for step in playbook.steps:
        if step.streams_to:
            yield from _check_source(playbook, step)
        yield from _check_ways_back(playbook, graph, step)
        for arc in step.routing.arcs:
            if arc.is_stream:
                yield from _check_stream(playbook, graph, step, arc)


def _check_names(playbook: Playbook, document: Document) -> Iterator[Problem]:
    """Finds the names that templates read of a chunk, in the step that takes it and in the arc to that step."""
    steps = document.root.get("workflow") if isinstance(document.root, dict) else None
    written = {str(entry.get("step")): entry for entry in steps or () if isinstance(entry, dict)}
    for step in playbook.steps:
        if step.loop is not None and step.loop.mode is LoopMode.STREAM:
            entry = written.get(step.name, {})
            yield from _misread(
                document, entry, [key for key in entry if key != "next"], (step.loop.iterator,)
            )
        following = written.get(step.name, {}).get("next")
        arcs = following.get("arcs", [following]) if isinstance(following, dict) else following
        for arc in arcs if isinstance(arcs, list) else ():
            if isinstance(arc, dict) and arc.get("on") == CALL_PARTIAL:
                yield from _misread(document, arc, [key for key in WHEN if key in arc], ("event", "payload"))


def _misread(
    document: Document, entry: dict[str, Any], keys: list[str], chunk: tuple[str, ...]
) -> Iterator[Problem]:
    """Names behind the path of a chunk that it does not have."""
    seen: set[int] = set()
    for place, key, text in (found for name in keys for found in texts_in(document, entry, name, seen)):
        try:
            paths = paths_in(text)
        except TemplateSyntaxError:
            continue  # reported as such
        names = {path[len(chunk)] for path in paths if path[: len(chunk)] == chunk and len(path) > len(chunk)}
        for name in sorted(names.difference(CHUNK_NAMES, _OF_MAPPINGS)):
            message = f"{key}: a chunk has no {name!r}; {suggestion(name, CHUNK_NAMES, 'it has')}"
            yield Problem(place, message, "warning", ProblemKind.UNDEFINED_NAME)


def _check_source(playbook: Playbook, step: Step) -> Iterator[Problem]:
    place, what = playbook.place_of(step), f"step {step.name!r}: its arc on: call.partial"
    if not step.tasks:
        message = f"{what} waits for chunks, and without a 'tool' it makes none"
        yield Problem(place, f"{message}; give it one, or leave out 'on'", kind=ProblemKind.MISSING_FIELD)
    if step.loop is None and _looks_again(step):
        message = f"{what} gives its result as one chunk, since its 'retry' looks at results that went well"
        remedy = "let its 'when' ask for 'error' alone, such as {{ error.retryable }}"
        yield Problem(place, f"{message}; {remedy}", "warning")
    if step.is_fanout:
        message = f"{what} cannot leave a fan-out, whose groups are ops of their own"
        yield Problem(place, f"{message}; use loop mode {LoopMode.PARALLEL}, or leave out 'on'")
    if step.wants_workers:
        message = f"{what} keeps it in the process that drives the execution, where the chunks are taken"
        yield Problem(
            place,
            f"{message}; leave out its dispatch to workers",
            "warning",
            ProblemKind.FIELD_WITHOUT_EFFECT,
        )


def _looks_again(step: Step) -> bool:
    """Reports whether another attempt may follow a success of the last task, so that its result is not final."""
    rules = step.tasks[-1].retry if step.tasks else ()
    return any(not rule.continues_success and not _when(rule.when).is_about_failures for rule in rules)


def _when(text: str | bool) -> Condition:
    try:
        return condition(text)
    except TemplateError:  # another check says so
        return condition(True)


def _check_end(playbook: Playbook, name: str) -> Iterator[Problem]:
    """``set`` and ``output`` of a step that takes chunks are of its end, where there is no chunk any more."""
    step = next((step for step in playbook.steps if step.name == name), None)
    if step is None or step.loop is None:
        return
    chunk = step.loop.iterator
    written = {"output": step.output, **{f"set {target}": value for target, value in step.set.items()}}
    for what, value in written.items():
        try:
            names = compile_value(value).names
        except TemplateError:  # another check says so
            continue
        if chunk in names - playbook.workload.keys() - {step.name for step in playbook.steps}:
            message = f"step {name!r}: {what}: there is no {chunk!r} when the step has ended"
            yield Problem(
                playbook.place_of(step),
                f"{message}; write it in its task, which runs once for each chunk",
                kind=ProblemKind.UNDEFINED_NAME,
            )


def _check_ways_back(playbook: Playbook, graph: StepGraph, step: Step) -> Iterator[Problem]:
    region = graph.region_of(step.name)
    for arc in step.routing.arcs:
        if region.is_stream and not arc.is_stream and arc.step in region.steps:
            message = (
                f"step {step.name!r} is part of a stream, and its arc to {arc.step!r} leads back into that"
            )
            remedy = "a stream cannot stand in a cycle; make a child playbook of one of them"
            yield Problem(arc.place or playbook.place_of(step), f"{message}; {remedy}")


def _check_stream(playbook: Playbook, graph: StepGraph, step: Step, arc: Arc) -> Iterator[Problem]:
    place = arc.place or playbook.place_of(step)
    what = f"step {step.name!r}: its arc on: call.partial to {arc.step!r}"
    if arc.step == step.name:
        yield Problem(
            place, f"{what} leads to the step itself; a child playbook can be called for each chunk"
        )
        return
    into = [
        (source.name, other)
        for source in playbook.steps
        for other in source.routing.arcs
        if other.step == arc.step and other is not arc
    ]
    if into:
        others = ", ".join(sorted({repr(name) for name, _ in into}))
        message = f"{what} is not the only one into that step: there is one from {others} as well"
        remedy = "a step that takes chunks runs as long as they come; give the other arc a step of its own"
        yield Problem(place, f"{message}; {remedy}", kind=ProblemKind.CONFLICTING_FIELDS)
    yield from _check_end(playbook, arc.step)
    if arc.step == graph.entry:
        yield Problem(place, f"{what} leads to where the playbook starts, before there is a chunk")
    if arc.set:
        message = f"{what} has a 'set', which would be written once for each chunk"
        yield Problem(
            place,
            f"{message}; write it in the task of {arc.step!r}, which sees the chunk",
            kind=ProblemKind.CONFLICTING_FIELDS,
        )
