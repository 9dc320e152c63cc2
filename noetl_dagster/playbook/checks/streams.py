"""What cannot be a stream: steps that arcs ``on: call.partial`` join, and nothing else may."""

from __future__ import annotations

from collections.abc import Iterator

from noetl_dagster.errors import Problem, ProblemKind
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Arc, LoopMode, Playbook, Step


def check_streams(playbook: Playbook) -> Iterator[Problem]:
    """A stream has one source for each step that takes it, and its steps are joined by nothing else."""
    graph = StepGraph(playbook)
    for step in playbook.steps:
        if step.streams_to:
            yield from _check_source(playbook, step)
        yield from _check_ways_back(playbook, graph, step)
        for arc in step.routing.arcs:
            if arc.is_stream:
                yield from _check_stream(playbook, graph, step, arc)


def _check_source(playbook: Playbook, step: Step) -> Iterator[Problem]:
    place, what = playbook.place_of(step), f"step {step.name!r}: its arc on: call.partial"
    if not step.tasks:
        message = f"{what} waits for chunks, and without a 'tool' it makes none"
        yield Problem(place, f"{message}; give it one, or leave out 'on'", kind=ProblemKind.MISSING_FIELD)
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
    if arc.step == graph.entry:
        yield Problem(place, f"{what} leads to where the playbook starts, before there is a chunk")
    if arc.set:
        message = f"{what} has a 'set', which would be written once for each chunk"
        yield Problem(
            place,
            f"{message}; write it in the step, which sees the chunk",
            kind=ProblemKind.CONFLICTING_FIELDS,
        )
