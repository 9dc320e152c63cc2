"""Finds mistakes of well-formed playbooks: targets, cycles, pools, sinks and pods."""

from __future__ import annotations

import re
from collections.abc import Iterator

from noetl_dagster.errors import Problem, ProblemKind
from noetl_dagster.playbook.checks.streams import check_streams
from noetl_dagster.playbook.checks.templates import check_templates
from noetl_dagster.playbook.dialects.block import Hints
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import (
    Dispatch,
    FanoutEngine,
    LoopMode,
    Playbook,
    ShardGranularity,
    Step,
    Task,
)
from noetl_dagster.playbook.wording import suggestion
from noetl_dagster.settings import POOL_NAME


def check_playbook(playbook: Playbook, document: Document | None = None) -> list[Problem]:
    """Everything found, errors and warnings.

    Args:
        document: the YAML behind the playbook, for exact places; read again from its source when not given.
    """
    problems = [*_check_targets(playbook), *_check_graph(playbook), *_check_workbook(playbook)]
    problems += [*_check_sources(playbook), *_check_own_results(playbook), *_check_pools(playbook)]
    problems += [*_check_partitions(playbook), *_check_sinks(playbook), *_check_state(playbook)]
    problems += _check_pods(playbook)
    if document is None:
        document = Document(playbook.source, playbook.file)
    problems += check_streams(playbook, document)
    problems += check_templates(playbook, document)
    return problems


def _check_targets(playbook: Playbook) -> Iterator[Problem]:
    names = tuple(step.name for step in playbook.steps)
    known = frozenset(names)
    hints = Hints(names, "steps")
    for step in playbook.steps:
        for arc in step.routing.arcs:
            if arc.step not in known:
                place = arc.place or playbook.place_of(step)
                message = f"step {step.name!r}: next leads to unknown step {arc.step!r}"
                yield Problem(place, f"{message}; {hints.hint(arc.step)}", kind=ProblemKind.UNKNOWN_STEP)


def _check_sources(playbook: Playbook) -> Iterator[Problem]:
    """A name in ``from`` would hide the result of a step of that name."""
    known = frozenset(step.name for step in playbook.steps)
    for step in playbook.steps:
        for name in known & step.sources.keys():
            place = step.sources[name].place or playbook.place_of(step)
            message = f"step {step.name!r}: from {name!r}: a step is called so too; rename one of them"
            yield Problem(place, message, kind=ProblemKind.DUPLICATE_NAME)


def _check_own_results(playbook: Playbook) -> Iterator[Problem]:
    """A step that reads its own last result has none to begin with."""
    for step in playbook.steps:
        for name, source in step.sources.items():
            if step.is_asset and source.asset == playbook.asset_key(step.name):
                message = f"step {step.name!r}: from {name!r} is its own result, which the first run has not"
                yield Problem(source.place or playbook.place_of(step), message, "warning")


_POOLS = "write dagster: {pools: {name: slots}} for a limit, or dispatch: workers for the pool of workers that runs it"


def _check_pools(playbook: Playbook) -> Iterator[Problem]:
    pools = tuple(playbook.dagster.pools)
    for step in playbook.steps:
        if step.wants_workers:
            yield from _check_worker_pool(playbook, step)
        elif step.spec.pool is not None and step.spec.pool not in pools:
            hint = suggestion(step.spec.pool, pools, "pools") if pools else _POOLS
            message = f"step {step.name!r}: no pool is called {step.spec.pool!r}; {hint}"
            yield Problem(playbook.place_of(step), message, kind=ProblemKind.UNKNOWN_POOL)


def _check_worker_pool(playbook: Playbook, step: Step) -> Iterator[Problem]:
    """``spec.pool`` of a step that goes to workers: any name may be that of a pool, which reports by itself."""
    if re.fullmatch(POOL_NAME, step.worker_pool) is None:
        message = (
            f"step {step.name!r}: no pool of workers can be called {step.worker_pool!r}; "
            "write small letters, digits and hyphens, 63 at most"
        )
        yield Problem(playbook.place_of(step), message, kind=ProblemKind.UNKNOWN_POOL)
    elif step.worker_pool in playbook.dagster.pools:
        message = (
            f"step {step.name!r}: pool {step.worker_pool!r} means workers here, since the step goes to workers; "
            "the slots of dagster.pools do not bound it"
        )
        yield Problem(playbook.place_of(step), message, "warning", ProblemKind.UNKNOWN_POOL)


def _check_graph(playbook: Playbook) -> Iterator[Problem]:
    graph = StepGraph(playbook)
    for step in playbook.steps:
        place = playbook.place_of(step)
        if step.name not in graph.reachable:
            message = f"step {step.name!r}: no path leads here from {graph.entry!r}; it never runs"
            yield Problem(place, message, "warning", ProblemKind.UNREACHABLE_STEP)
        if step.loop is not None and not step.tasks:
            message = f"step {step.name!r}: a loop needs a 'tool' to run for each item"
            yield Problem(place, message, kind=ProblemKind.MISSING_FIELD)
        region = graph.region_of(step.name)
        if step.is_fanout and region.is_cycle:
            cycle = " -> ".join((*region.steps, region.steps[0]))
            message = f"step {step.name!r}: a fan-out cannot stand in a cycle ({cycle}); "
            yield Problem(place, message + f"use loop mode {LoopMode.PARALLEL}, or move it out of the cycle")


def _check_partitions(playbook: Playbook) -> Iterator[Problem]:
    """A partition has one command for many items, so nothing can be asked that is about one item's command."""
    for step in playbook.steps:
        if step.loop is None or not step.is_fanout:
            continue
        if step.loop.fanout.granularity is not ShardGranularity.PARTITION:
            continue
        tasks = _tasks(playbook, step)
        unfit = {
            "a 'sink' writes each item's result with the item's completion": any(task.sink for task in tasks),
            "a 'retry' block makes commands of an item's attempts": any(task.retry for task in tasks),
            "a worker of the pool runs an item's command": _wants_workers(step),
            "'state' asks each item's result how far it came": step.state is not None,
        }
        for reason, holds in unfit.items():
            if holds:
                message = f"step {step.name!r}: {reason}, and partitions have none"
                remedy = "use fanout.granularity: item"
                yield Problem(playbook.place_of(step), f"{message}; {remedy}")


def _check_sinks(playbook: Playbook) -> Iterator[Problem]:
    """Warns of files that a worker stages: the driver, which publishes them, may be on another machine."""
    for step in playbook.steps:
        sinks = [task.sink for task in _tasks(playbook, step) if task.sink is not None]
        if _wants_workers(step) and any(sink.is_local for sink in sinks):
            message = f"step {step.name!r}: its sink writes files; it runs in the driver, not in workers"
            remedy = "write to a bucket or to postgres to have workers run it"
            yield Problem(playbook.place_of(step), f"{message}; {remedy}", "warning")


def _check_state(playbook: Playbook) -> Iterator[Problem]:
    """A watermark comes from what the step's tool gives."""
    for step in playbook.steps:
        if step.state is not None and not step.tasks:
            message = f"step {step.name!r}: 'state' needs a 'tool', whose result says how far the step came"
            yield Problem(playbook.place_of(step), message, kind=ProblemKind.MISSING_FIELD)


def _check_pods(playbook: Playbook) -> Iterator[Problem]:
    """A cycle or a stream is one op, which has one pod; and what asks for a pod should be what works there."""
    for region in StepGraph(playbook).regions:
        asking = [step for step in map(playbook.step, region.steps) if step.spec.pod is not None]
        for step in asking[1:]:
            if step.spec.pod != asking[0].spec.pod:
                ring = region.steps if region.is_stream else (*region.steps, region.steps[0])
                kind = "stream" if region.is_stream else "cycle"
                message = f"step {step.name!r}: its pod is another than that of step {asking[0].name!r}"
                remedy = (
                    f"the {kind} {' -> '.join(ring)} runs in one pod; say the same of both, or of one alone"
                )
                yield Problem(
                    playbook.place_of(step), f"{message}; {remedy}", kind=ProblemKind.CONFLICTING_FIELDS
                )
        for step in asking:
            if _wants_workers(step):
                message = (
                    f"step {step.name!r}: workers of the pool run it, and its pod would only wait for them"
                )
                remedy = "leave out 'kubernetes', or the dispatch to workers"
                if any(task.kind == "playbook" for task in step.tasks):
                    message = f"step {step.name!r}: a child playbook starts in the run's process"
                    remedy = "leave out 'kubernetes' and the dispatch; the child's steps say where they run"
                yield Problem(
                    playbook.place_of(step),
                    f"{message}; {remedy}",
                    "warning",
                    ProblemKind.FIELD_WITHOUT_EFFECT,
                )
            elif step.is_fanout and any(task.sink and task.sink.is_local for task in _tasks(playbook, step)):
                message = f"step {step.name!r}: its sink writes files, and each pod has a disk of its own"
                remedy = "write to a bucket or to postgres, or to a volume that all pods mount"
                yield Problem(playbook.place_of(step), f"{message}; {remedy}", "warning")


def _tasks(playbook: Playbook, step: Step) -> list[Task]:
    """A step's tasks, with those of the workbook that they name."""
    named = (playbook.workbook.get(_workbook_name(task) or "") for task in step.tasks)
    return [*step.tasks, *(task for task in named if task is not None)]


def _wants_workers(step: Step) -> bool:
    """Reports whether a step asks that workers of the pool run its commands."""
    engine = None if step.loop is None or not step.is_fanout else step.loop.fanout.engine
    return engine is FanoutEngine.WORKERS or step.spec.dispatch is Dispatch.WORKERS


def _check_workbook(playbook: Playbook) -> Iterator[Problem]:
    for step in playbook.steps:
        for task in step.tasks:
            wanted = _workbook_name(task)
            if wanted is not None and wanted not in playbook.workbook:
                known = ", ".join(playbook.workbook) or "none"
                message = f"step {step.name!r}: no workbook task {wanted!r}; workbook: {known}"
                place = task.place or playbook.place_of(step)
                yield Problem(place, message, kind=ProblemKind.UNKNOWN_TASK)


def _workbook_name(task: Task) -> str | None:
    """The workbook entry that a task names, None when it names none or by a template."""
    if task.kind != "workbook":
        return None
    name = str(task.config.get("task") or "")
    return None if not name or "{{" in name else name
