"""Checks streams, which arcs ``on: call.partial`` form: their shape, and the names that templates read of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateSyntaxError

from noetl_dagster.errors import Place, Problem, ProblemKind, TemplateError
from noetl_dagster.playbook.checks.templates import SKIPPED_KEYS
from noetl_dagster.playbook.dialects.routing import streaming_arcs
from noetl_dagster.playbook.document import Document, texts_in
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Arc, LoopMode, Playbook, Step
from noetl_dagster.playbook.templates.chunks import CHUNK_NAMES
from noetl_dagster.playbook.templates.reading import paths_in
from noetl_dagster.playbook.templates.rendering import compile_value, condition
from noetl_dagster.playbook.tool_kinds import WHEN
from noetl_dagster.playbook.wording import suggestion

_OF_MAPPINGS = frozenset({"get", "items", "keys", "values"})


def problem_of(
    playbook: Playbook,
    step: Step,
    message: str,
    severity: str = "error",
    kind: ProblemKind = ProblemKind.INVALID_VALUE,
    place: Place | None = None,
) -> Problem:
    """Makes a problem of a step, at the step's place if there is no other."""
    place = place or step.place or Place(playbook.file, 1)
    return Problem(place, f"step {step.name!r}: {message}", severity, kind)


def check_streams(playbook: Playbook, graph: StepGraph, document: Document) -> Iterator[Problem]:
    """Checks that each step of a stream has one source, and that no other arc joins its steps."""
    yield from _check_names(playbook, document)
    for step in playbook.steps:
        if step.streams_to:
            yield from _check_source(playbook, step)
        region = graph.region_of(step.name)
        for arc in step.routing.arcs:
            if arc.is_stream:
                yield from _check_stream(playbook, graph, step, arc)
            elif region.is_stream and arc.step in region.steps:
                message = f"is part of a stream, and its arc to {arc.step!r} leads back into that"
                remedy = "a stream cannot stand in a cycle; make a child playbook of one of them"
                place = arc.place or step.place or Place(playbook.file, 1)
                yield Problem(place, f"step {step.name!r} {message}; {remedy}")


def _check_names(playbook: Playbook, document: Document) -> Iterator[Problem]:
    """Finds the names that templates read of a chunk, in the step that takes it and in the arc to that step."""
    steps = document.root.get("workflow") if isinstance(document.root, dict) else None
    written = {str(entry.get("step")): entry for entry in steps or () if isinstance(entry, dict)}
    for step in playbook.steps:
        entry = written.get(step.name, {})
        if step.loop is not None and step.loop.mode is LoopMode.STREAM:
            keys = [key for key in entry if key != "next"]
            yield from _misread(document, entry, keys, (step.loop.iterator,))
        for arc in streaming_arcs(entry):
            yield from _misread(document, arc, [key for key in WHEN if key in arc], ("event", "payload"))


def _misread(document: Document, entry: dict[str, Any], keys: list[str], chunk: tuple[str, ...]) -> Iterator[Problem]:
    """Names behind the path of a chunk that it does not have."""
    seen: set[int] = set()
    for owner, name, label, text in (
        entry_text for key in keys for entry_text in texts_in(entry, key, SKIPPED_KEYS, seen)
    ):
        try:
            paths = paths_in(text, command=document.is_command(text)) if "{" in text else ()
        except TemplateSyntaxError:
            continue  # reported as such
        names = {path[len(chunk)] for path in paths if path[: len(chunk)] == chunk and len(path) > len(chunk)}
        for unknown in sorted(names.difference(CHUNK_NAMES, _OF_MAPPINGS)):
            message = f"{label}: a chunk has no {unknown!r}; {suggestion(unknown, CHUNK_NAMES, 'it has')}"
            yield Problem(document.place(owner, name), message, "warning", ProblemKind.UNDEFINED_NAME)


def _check_source(playbook: Playbook, step: Step) -> Iterator[Problem]:
    what = "its arc on: call.partial"
    if not step.tasks:
        message = f"{what} waits for chunks, and without a 'tool' it makes none"
        remedy = "give it one, or leave out 'on'"
        yield problem_of(playbook, step, f"{message}; {remedy}", kind=ProblemKind.MISSING_FIELD)
    if step.loop is None and _looks_again(step):
        message = f"{what} gives its result as one chunk, since its 'retry' looks at results that went well"
        remedy = "let its 'when' ask for 'error' alone, such as {{ error.retryable }}"
        yield problem_of(playbook, step, f"{message}; {remedy}", "warning")
    if step.is_fanout:
        message = f"{what} cannot leave a fan-out, whose groups are ops of their own"
        yield problem_of(playbook, step, f"{message}; use loop mode {LoopMode.PARALLEL}, or leave out 'on'")
    if step.wants_workers:
        message = f"{what} keeps it in the process that drives the execution, where the chunks are taken"
        remedy = "leave out its dispatch to workers"
        kind = ProblemKind.FIELD_WITHOUT_EFFECT
        yield problem_of(playbook, step, f"{message}; {remedy}", "warning", kind)


def _looks_again(step: Step) -> bool:
    """Reports whether another attempt may follow a success of the last task, so that its result is not final."""
    for rule in step.tasks[-1].retry if step.tasks else ():
        try:
            if not rule.continues_success and not condition(rule.when).is_about_failures:
                return True
        except TemplateError:  # another check says so
            continue
    return False


def _check_stream(playbook: Playbook, graph: StepGraph, step: Step, arc: Arc) -> Iterator[Problem]:
    what = f"its arc on: call.partial to {arc.step!r}"
    if arc.step == step.name:
        message = f"{what} leads to the step itself; a child playbook can be called for each chunk"
        yield problem_of(playbook, step, message, place=arc.place)
        return
    sources = [(source, other) for source in playbook.steps for other in source.routing.arcs]
    into = {repr(source.name) for source, other in sources if other.step == arc.step and other is not arc}
    if into:
        others = ", ".join(sorted(into))
        message = f"{what} is not the only one into that step: there is one from {others} as well"
        remedy = "a step that takes chunks runs as long as they come; give the other arc a step of its own"
        kind = ProblemKind.CONFLICTING_FIELDS
        yield problem_of(playbook, step, f"{message}; {remedy}", kind=kind, place=arc.place)
    yield from _check_end(playbook, arc.step)
    if arc.step == graph.entry:
        message = f"{what} leads to where the playbook starts, before there is a chunk"
        yield problem_of(playbook, step, message, place=arc.place)
    if arc.set:
        message = f"{what} has a 'set', which would be written once for each chunk"
        remedy = f"write it in the task of {arc.step!r}, which sees the chunk"
        kind = ProblemKind.CONFLICTING_FIELDS
        yield problem_of(playbook, step, f"{message}; {remedy}", kind=kind, place=arc.place)


def _check_end(playbook: Playbook, name: str) -> Iterator[Problem]:
    """Checks ``set`` and ``output`` of a step that takes chunks: at its end there is no chunk any more."""
    steps = {step.name: step for step in playbook.steps}
    step = steps.get(name)
    if step is None or step.loop is None:
        return
    chunk = step.loop.iterator
    for what, value in {
        "output": step.output,
        **{f"set {name}": value for name, value in step.set.items()},
    }.items():
        try:
            names = compile_value(value).names
        except TemplateError:  # another check says so
            continue
        if chunk in names - playbook.workload.keys() - steps.keys():
            message = f"{what}: there is no {chunk!r} when the step has ended"
            remedy = "write it in its task, which runs once for each chunk"
            yield problem_of(playbook, step, f"{message}; {remedy}", kind=ProblemKind.UNDEFINED_NAME)
