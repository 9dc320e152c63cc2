"""Finds mistakes of well-formed playbooks: targets, cycles, pools, sinks, pods and streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from noetl_dagster.errors import Place, Problem, ProblemKind, TemplateError
from noetl_dagster.extras import has_extra, needs_extra
from noetl_dagster.playbook.checks.templates import check_templates
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.graph import Region, StepGraph
from noetl_dagster.playbook.models import Arc, LoopMode, Playbook, ShardGranularity, Step, Task
from noetl_dagster.playbook.permissions import refusal, refused, spec_of_pod, spec_of_task
from noetl_dagster.playbook.templates.rendering import compile_value, condition
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.playbook.wording import Hints, hints_against, is_template, suggestion
from noetl_dagster.settings import POOL_NAME, get_settings


def check_playbook(playbook: Playbook, document: Document) -> list[Problem]:
    """Yields all problems, errors and warnings; ``document`` is the YAML of the playbook."""
    graph = StepGraph(playbook)
    hints = hints_against(tuple(step.name for step in playbook.steps), "steps")
    problems: list[Problem] = []
    for step in playbook.steps:
        problems += _check_graph(playbook, graph, step, hints)
        problems += _check_sources(playbook, graph, step)
        problems += _check_pool(playbook, step)
        problems += _check_partitions(playbook, step)
        problems += _check_tasks(playbook, step)
        problems += _check_rights(playbook, step)
    for region in graph.regions:
        problems += _check_pods(playbook, region)
    if playbook.pod is not None:
        problems += _refused(spec_of_pod(playbook.pod), playbook.pod.annotations, Place(playbook.file, 1), "executor")
    problems += check_streams(playbook, graph)
    problems += check_templates(playbook, document)
    return problems


def _check_graph(playbook: Playbook, graph: StepGraph, step: Step, hints: Hints) -> Iterator[Problem]:
    for arc in step.routing.arcs:
        if arc.step not in graph:
            message = f"next leads to unknown step {arc.step!r}; {hints(arc.step)}"
            yield problem_of(playbook, step, message, kind=ProblemKind.UNKNOWN_STEP, place=arc.place)
    if step.name not in graph.reachable:
        message = f"no path leads here from {graph.entry!r}; it never runs"
        yield problem_of(playbook, step, message, "warning", ProblemKind.UNREACHABLE_STEP)
    region = graph.region_of[step.name]
    if step.is_fanout and region.is_cycle:
        message = f"a fan-out cannot stand in a cycle ({_ring(region)})"
        remedy = f"use loop mode {LoopMode.PARALLEL}, or move it out of the cycle"
        yield problem_of(playbook, step, f"{message}; {remedy}")


def _check_sources(playbook: Playbook, graph: StepGraph, step: Step) -> Iterator[Problem]:
    """Checks ``from``: a name must not hide a step's result; a step's own last result may be missing."""
    for name, source in step.sources.items():
        if name in graph:
            message = f"from {name!r}: a step is called so too; rename one of them"
            yield problem_of(playbook, step, message, kind=ProblemKind.DUPLICATE_NAME, place=source.place)
        if step.is_asset and source.asset == playbook.asset_key(step.name):
            message = f"from {name!r} is its own result, which the first run has not"
            yield problem_of(playbook, step, message, "warning", place=source.place)


_POOLS = "write dagster: {pools: {name: slots}} for a limit, or dispatch: workers for the pool of workers that runs it"


def _check_pool(playbook: Playbook, step: Step) -> Iterator[Problem]:
    """Checks ``spec.pool`` if it is one of Dagster's; any name may be a pool of workers, which reports by itself."""
    pools, pool = tuple(playbook.dagster.pools), step.spec.pool
    if not step.wants_workers:
        if pool is not None and pool not in pools:
            hint = suggestion(pool, pools, "pools") if pools else _POOLS
            message = f"no pool is called {pool!r}; {hint}"
            yield problem_of(playbook, step, message, kind=ProblemKind.UNKNOWN_POOL)
    elif re.fullmatch(POOL_NAME, step.worker_pool) is None:
        message = f"no pool of workers can be called {step.worker_pool!r}"
        remedy = "write small letters, digits and hyphens, 63 at most"
        yield problem_of(playbook, step, f"{message}; {remedy}", kind=ProblemKind.UNKNOWN_POOL)
    elif step.worker_pool in pools:
        message = f"pool {step.worker_pool!r} means workers here, since the step goes to workers"
        effect = "the slots of dagster.pools do not bound it"
        yield problem_of(playbook, step, f"{message}; {effect}", "warning", ProblemKind.UNKNOWN_POOL)


def _check_partitions(playbook: Playbook, step: Step) -> Iterator[Problem]:
    """Refuses settings of single commands for partitions, which have one command for many items."""
    if step.loop is None or not step.is_fanout:
        return
    if step.loop.fanout.granularity is not ShardGranularity.PARTITION:
        return
    tasks = _tasks(playbook, step)
    unfit = {
        "a 'sink' writes each item's result with the item's completion": any(task.sink for task in tasks),
        "a 'retry' block makes commands of an item's attempts": any(task.retry for task in tasks),
        "a worker of the pool runs an item's command": step.wants_workers,
        "'state' asks each item's result how far it came": step.state is not None,
    }
    for reason, holds in unfit.items():
        if holds:
            remedy = "use fanout.granularity: item"
            yield problem_of(playbook, step, f"{reason}, and partitions have none; {remedy}")


def _check_tasks(playbook: Playbook, step: Step) -> Iterator[Problem]:
    """Checks that tools and tasks of the workbook exist, and that the driver can publish files of workers."""
    if step.loop is not None and not step.tasks:
        message = "a loop needs a 'tool' to run for each item"
        yield problem_of(playbook, step, message, kind=ProblemKind.MISSING_FIELD)
    if step.state is not None and not step.tasks:
        message = "'state' needs a 'tool', whose result says how far the step came"
        yield problem_of(playbook, step, message, kind=ProblemKind.MISSING_FIELD)
    for task in step.tasks:
        wanted = _workbook_name(task)
        if wanted is not None and wanted not in playbook.workbook:
            message = f"no workbook task {wanted!r}; workbook: {', '.join(playbook.workbook) or 'none'}"
            yield problem_of(playbook, step, message, kind=ProblemKind.UNKNOWN_TASK, place=task.place)
    for task in _tasks(playbook, step):
        kind = TOOL_KINDS.get(task.kind)
        if kind is not None and kind.extra and not has_extra(kind.extra):  # the machine that runs it may have it
            message = f"{needs_extra(f'kind {task.kind}', kind.extra)}; it is not installed here"
            yield problem_of(playbook, step, message, "warning", ProblemKind.MISSING_EXTRA, place=task.place)
    if step.wants_workers and _writes_files(playbook, step):
        message = "its sink writes files; it runs in the driver, not in workers"
        remedy = "write to a bucket or to postgres to have workers run it"
        yield problem_of(playbook, step, f"{message}; {remedy}", "warning")


def _check_rights(playbook: Playbook, step: Step) -> Iterator[Problem]:
    """Warns about rights of pods that the settings of this process do not allow; another process may have others."""
    place, what = step.place or Place(playbook.file, 1), f"step {step.name!r}"
    if step.spec.pod is not None:
        yield from _refused(spec_of_pod(step.spec.pod), step.spec.pod.annotations, place, f"{what}, kubernetes")
    for task in _tasks(playbook, step):
        if task.kind == "container":
            where, name = task.place or place, f"{what}, task {task.name!r}"
            yield from _refused(spec_of_task(task.config), task.config.get("annotations"), where, name)


def _refused(spec: Mapping[str, Any], annotations: Any, place: Place, what: str) -> Iterator[Problem]:
    rights = [
        right for right in refused(spec, get_settings().container_allow, annotations) if not is_template(right.value)
    ]
    if rights:
        yield Problem(place, f"{what}: {refusal(rights)}", "warning", ProblemKind.RIGHT_NOT_ALLOWED)


def _check_pods(playbook: Playbook, region: Region) -> Iterator[Problem]:
    """Checks requests for pods: a cycle or a stream is one op with one pod, and its work should happen there."""
    asking = [step for step in map(playbook.step, region.steps) if step.spec.pod is not None]
    for step in asking:
        if step.spec.pod != asking[0].spec.pod:
            where = f"stream {' -> '.join(region.steps)}" if region.is_stream else f"cycle {_ring(region)}"
            message = f"its pod is another than that of step {asking[0].name!r}"
            remedy = f"the {where} runs in one pod; say the same of both, or of one alone"
            yield problem_of(playbook, step, f"{message}; {remedy}", kind=ProblemKind.CONFLICTING_FIELDS)
        if step.wants_workers:
            message = "workers of the pool run it, and its pod would only wait for them"
            remedy = "leave out 'kubernetes', or the dispatch to workers"
            if any(task.kind == "playbook" for task in step.tasks):
                message = "a child playbook starts in the run's process"
                remedy = "leave out 'kubernetes' and the dispatch; the child's steps say where they run"
            message = f"{message}; {remedy}"
            yield problem_of(playbook, step, message, "warning", ProblemKind.FIELD_WITHOUT_EFFECT)
        elif step.is_fanout and _writes_files(playbook, step):
            message = "its sink writes files, and each pod has a disk of its own"
            remedy = "write to a bucket or to postgres, or to a volume that all pods mount"
            yield problem_of(playbook, step, f"{message}; {remedy}", "warning")


def _ring(region: Region) -> str:
    return " -> ".join((*region.steps, region.steps[0]))


def _tasks(playbook: Playbook, step: Step) -> list[Task]:
    """Yields a step's tasks, and the tasks of the workbook that they name."""
    named = (playbook.workbook.get(_workbook_name(task) or "") for task in step.tasks)
    return [*step.tasks, *(task for task in named if task is not None)]


def _writes_files(playbook: Playbook, step: Step) -> bool:
    return any(task.sink is not None and task.sink.is_local for task in _tasks(playbook, step))


def _workbook_name(task: Task) -> str | None:
    """Returns the workbook entry that a task names; None if it names none, or by a template."""
    name = str(task.config.get("task") or "") if task.kind == "workbook" else ""
    return None if not name or "{{" in name else name


# -- streams, which arcs ``on: call.partial`` form


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


def check_streams(playbook: Playbook, graph: StepGraph) -> Iterator[Problem]:
    """Checks that each step of a stream has one source, and that no other arc joins its steps."""
    for step in playbook.steps:
        if step.streams_to:
            yield from _check_source(playbook, step)
        region = graph.region_of[step.name]
        for arc in step.routing.arcs:
            if arc.is_stream:
                yield from _check_stream(playbook, graph, step, arc)
            elif region.is_stream and arc.step in region.steps:
                message = f"is part of a stream, and its arc to {arc.step!r} leads back into that"
                remedy = "a stream cannot stand in a cycle; make a child playbook of one of them"
                place = arc.place or step.place or Place(playbook.file, 1)
                yield Problem(place, f"step {step.name!r} {message}; {remedy}")


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
    taker = next((one for one in playbook.steps if one.name == arc.step and one.loop is not None), None)
    with suppress(TemplateError):  # another check reports it
        chunk = "" if taker is None or taker.loop is None else taker.loop.iterator
        known = chunk in playbook.workload or chunk in graph
        if taker is not None and not known and chunk in compile_value([taker.set, taker.output]).names:
            message = f"set and output: there is no {chunk!r} when the step has ended"
            remedy = "write it in its task, which runs once for each chunk"
            yield problem_of(playbook, taker, f"{message}; {remedy}", kind=ProblemKind.UNDEFINED_NAME)
    if arc.step == graph.entry:
        message = f"{what} leads to where the playbook starts, before there is a chunk"
        yield problem_of(playbook, step, message, place=arc.place)
    if arc.set:
        message = f"{what} has a 'set', which would be written once for each chunk"
        remedy = f"write it in the task of {arc.step!r}, which sees the chunk"
        kind = ProblemKind.CONFLICTING_FIELDS
        yield problem_of(playbook, step, f"{message}; {remedy}", kind=kind, place=arc.place)
