"""The state of an execution, folded from its lifecycle events, in memory.

It holds everything that routing needs: values, results, arcs. The bounded, stored summary for people is the row of
:mod:`~noetl_dagster.events.projection_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from noetl_dagster.events.envelopes import Envelope, from_result
from noetl_dagster.events.types import Event, EventType


class ExecutionStatus(StrEnum):
    """The status of an execution."""

    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StepStatus(StrEnum):
    """The status of a visit that has ended."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


PASSED = "PASSED"
"""Status of a check's event; the other is ``FAILED``."""

STATUS_OF_END: Mapping[str, ExecutionStatus] = {
    EventType.PLAYBOOK_COMPLETED: ExecutionStatus.COMPLETED,
    EventType.PLAYBOOK_FAILED: ExecutionStatus.FAILED,
    EventType.EXECUTION_CANCELLED: ExecutionStatus.CANCELLED,
}
"""Statuses by the events that end an execution; at most one such event for each epoch of an execution."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check of the result of a visit.

    Attributes:
        severity: ``warn`` or ``error``.
        blocking: the step fails if the check does not pass.
        why: the reason in words, if it did not pass.
        facts: numbers and examples, for people.
    """

    step: str
    visit: int
    name: str
    passed: bool
    severity: str = "error"
    blocking: bool = False
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of one visit of a step.

    Attributes:
        fired: targets of the arcs that fired, in arc order.
        unhandled: the step failed and no arc handled the failure, so the execution fails.
        watermark: the new value of the step's watermark, if it moved.
    """

    step: str
    visit: int
    epoch: int
    status: StepStatus
    envelope: Envelope
    fired: tuple[str, ...] = ()
    unhandled: bool = False
    error: str | None = None
    event_id: int = 0
    watermark: dict[str, Any] | None = None

    @property
    def failure(self) -> str:
        """The error, which names the step once."""
        named, error = f"step {self.step}: ", str(self.error)
        return error if error.startswith(named) else named + error


@dataclass(slots=True)
class LoopStart:
    """One start of a loop or fan-out. A resumed one keeps the finished iterations of the one before it."""

    loop_id: str
    size: int
    epoch: int
    context: dict[str, Any]
    continues: str | None = None
    done: bool = False


@dataclass(slots=True)
class ExecutionState:
    """The state of an execution according to the log.

    Attributes:
        lenient: its playbook was loaded leniently.
        outer_iteration: ``iter`` of the parent, if a loop of the parent runs this child playbook.
        epoch: counts starts and resumptions, from 1.
        run_id: the Dagster run that drives this epoch, None without Dagster.
        ctx: the patches of all ended steps, in order.
        visits: latest visit that was entered, by step.
        ends: every visit that ended, by step and visit; ``latest``: the latest that was not skipped, by step.
        loops: starts of each visit's loop, in order.
        reads: results of other assets that a visit reads, by name: one as the log stores it, or several by partition.
        settings: rendered values of the templates in a visit's settings when it was entered.
        watermarks: value of a visit's watermark when it was entered.
        checks: latest outcome of each check, by step, visit and name.
        trace: the foreign trace that it is a part of, or was requested by.
        began: id of the event that began the current run: its first, or the resumption after it had stopped.
        stops: how often it has ended; more than once if it failed and was resumed.
        entered: id of the event that began each visit which has not ended.
        exits: how often each visit has ended.
        lost: visits with results whose bytes are missing, and the epoch after which they are made again.
    """

    execution_id: int
    playbook: str = ""
    catalog_id: int | None = None
    parent_execution_id: int | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    outer_iteration: dict[str, Any] | None = None
    file: str = ""
    epoch: int = 0
    run_id: str | None = None
    status: ExecutionStatus = ExecutionStatus.RUNNING
    error: str | None = None
    ctx: dict[str, Any] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)
    ends: dict[tuple[str, int], StepEnd] = field(default_factory=dict)
    latest: dict[str, StepEnd] = field(default_factory=dict)
    loops: dict[tuple[str, int], list[LoopStart]] = field(default_factory=dict)
    partition: dict[str, Any] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    lenient: bool = False
    reads: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    settings: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    watermarks: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    checks: dict[tuple[str, int, str], CheckOutcome] = field(default_factory=dict)
    trace: dict[str, str] = field(default_factory=dict)
    began: int = 0
    stops: int = 0
    entered: dict[tuple[str, int], int] = field(default_factory=dict)
    exits: dict[tuple[str, int], int] = field(default_factory=dict)
    lost: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def fold(cls, execution_id: int, events: Iterable[Event]) -> ExecutionState:
        """Returns the state after events, which are in the order of their ids."""
        state = cls(execution_id)
        for event in events:
            state.apply(event)
        return state

    @property
    def is_running(self) -> bool:
        """True until the execution ends."""
        return self.status is ExecutionStatus.RUNNING

    def end_of(self, step: str, visit: int) -> StepEnd | None:
        """Returns the valid end of a visit.

        An unhandled failure of an older epoch is not valid, nor is an end whose result was lost in an older epoch.
        """
        end = self.ends.get((step, visit))
        if end is None or end.epoch == self.epoch:
            return end
        is_lost = end.epoch <= self.lost.get((step, visit), 0) < self.epoch
        return None if end.unhandled or is_lost else end

    def apply(self, event: Event) -> None:
        """Applies one event; types other than lifecycle events change nothing."""
        handler = _HANDLERS.get(event.event_type)
        if handler is not None:
            handler(self, event)

    def _initialized(self, event: Event) -> None:
        context = event.context or {}
        self.playbook = event.node_name or ""
        self.catalog_id = event.catalog_id
        self.parent_execution_id = event.parent_execution_id
        self.workload = context.get("workload", {})
        self.partition = context.get("partition")
        self.renamed = context.get("renamed", {})
        self.lenient = context.get("lenient", False)
        self.outer_iteration = event.meta.get("parent_iter")
        self.file = context.get("file", "")
        self.epoch = int(event.meta.get("epoch", 1))
        self.run_id = event.meta.get("dagster_run_id")
        self.trace = event.meta.get("trace", {})
        self.began = event.event_id

    def _resumed(self, event: Event) -> None:
        self.epoch = int(event.meta["epoch"])
        self.run_id = event.meta.get("dagster_run_id")
        if not self.is_running:
            self.began = event.event_id
        self.status = ExecutionStatus.RUNNING
        self.error = None

    def _terminal(self, event: Event) -> None:
        self.stops += 1
        if int(event.meta.get("epoch", 1)) < self.epoch:
            return  # by the clock of its process, it ended after another one had resumed it
        self.status = STATUS_OF_END[event.event_type]
        self.error = event.error

    def _entered(self, event: Event) -> None:
        step, visit = key = _visit_of(event)
        self.visits[step] = max(visit, self.visits.get(step, 0))
        self.entered.setdefault(key, event.event_id)
        context = event.context or {}
        for name, values in (
            ("reads", self.reads),
            ("settings", self.settings),
            ("watermark", self.watermarks),
        ):
            if context.get(name):
                values[key] = context[name]

    def _exited(self, event: Event) -> None:
        step, visit = key = _visit_of(event)
        end = StepEnd(
            step=step,
            visit=visit,
            epoch=int(event.meta.get("epoch", 1)),
            status=StepStatus(event.status or "COMPLETED"),
            envelope=from_result(event.result),
            fired=tuple(event.meta.get("fired", ())),
            unhandled=bool(event.meta.get("unhandled")),
            error=event.error,
            event_id=event.event_id,
            watermark=event.meta.get("watermark"),
        )
        if end.unhandled and end.epoch < self.epoch:
            return  # its driver had not read yet that the execution was resumed
        before = self.ends.get(key)
        again = key in self.lost and before is not None and before.status is StepStatus.COMPLETED
        self.ends[key] = end
        self.exits[key] = self.exits.get(key, 0) + 1
        self.entered.pop(key, None)
        if end.status is not StepStatus.SKIPPED and visit >= self.visits.get(step, 0):
            self.latest[step] = end
        if again:  # later steps may have replaced what the first end wrote to ctx
            return
        for path, value in (event.context or {}).get("patches", ()):
            assign(self.ctx, path, value)

    def _warned(self, event: Event) -> None:
        for step, visit in event.meta.get("lost", ()):
            self.lost[(step, int(visit))] = int(event.meta["epoch"])

    def _checked(self, event: Event) -> None:
        meta, (step, visit) = event.meta, _visit_of(event)
        self.checks[(step, visit, meta["check"])] = CheckOutcome(
            step=step,
            visit=visit,
            name=meta["check"],
            passed=event.status == PASSED,
            severity=meta.get("severity", "error"),
            blocking=bool(meta.get("blocking")),
            why=event.error or "",
            facts=(event.context or {}).get("facts", {}),
        )

    def checks_of(self, step: str, visit: int) -> list[CheckOutcome]:
        """Returns the outcomes of the checks of a visit, in the order in which they were evaluated."""
        return [one for (name, number, _), one in self.checks.items() if (name, number) == (step, visit)]

    def _loop_started(self, event: Event) -> None:
        meta = event.meta
        run = LoopStart(
            loop_id=meta["loop_id"],
            size=int(meta.get("total_shards", meta.get("collection_size", 0))),
            epoch=int(meta.get("epoch", 1)),
            context=event.context or {},
            continues=meta.get("continues"),
        )
        self.loops.setdefault(_visit_of(event), []).append(run)

    def _loop_done(self, event: Event) -> None:
        for runs in self.loops.values():
            for run in runs:
                if run.loop_id == event.meta.get("loop_id"):
                    run.done = True


def _visit_of(event: Event) -> tuple[str, int]:
    return event.node_name or "", int(event.meta.get("visit", 1))


def assign(target: dict[str, Any], path: list[str] | tuple[str, ...], value: Any) -> None:
    """Sets ``target[path[0]][path[1]]... = value``, creating the mappings between."""
    for key in path[:-1]:
        inner = target.get(key)
        if not isinstance(inner, dict):
            inner = target[key] = {}
        target = inner
    target[path[-1]] = value


_HANDLERS: Mapping[Any, Callable[[ExecutionState, Event], None]] = {
    EventType.PLAYBOOK_INITIALIZED: ExecutionState._initialized,
    EventType.EXECUTION_RESUMED: ExecutionState._resumed,
    EventType.STEP_ENTER: ExecutionState._entered,
    EventType.STEP_EXIT: ExecutionState._exited,
    EventType.CHECK_EVALUATED: ExecutionState._checked,
    EventType.LOOP_STARTED: ExecutionState._loop_started,
    EventType.LOOP_FANOUT_STARTED: ExecutionState._loop_started,
    EventType.LOOP_DONE: ExecutionState._loop_done,
    EventType.LOOP_FANIN_COMPLETED: ExecutionState._loop_done,
    EventType.WARNING: ExecutionState._warned,
} | dict.fromkeys(STATUS_OF_END, ExecutionState._terminal)
