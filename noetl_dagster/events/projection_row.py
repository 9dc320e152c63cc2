"""One row of ``noetl.execution``, and how events change it, without a database.

It folds batches of events in commit order into a bounded row that is stored between batches; iterations arrive as
counts. The state that drives an execution, :class:`~noetl_dagster.events.state.ExecutionState`, is folded in the order
of event ids, is not stored, and holds every value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from noetl_dagster.events.envelopes import truncated
from noetl_dagster.events.state import STATUS_OF_END, ExecutionStatus
from noetl_dagster.events.types import EventType

WARNINGS_KEPT = 20

Done = dict[tuple[str, int], int]
"""Successful iterations, by step and visit."""


@dataclass(slots=True)
class ProjectedExecution:
    """One row of ``noetl.execution``.

    ``state`` has ``loop`` and ``fanout`` entries by step (with the ``visit`` they belong to), ``steps`` in the order
    in which they were entered, ``epoch``, ``run_id``, ``workload`` and ``warnings``.
    """

    execution_id: int
    catalog_id: int | None = None
    parent_execution_id: int | None = None
    playbook: str | None = None
    status: str = ExecutionStatus.RUNNING
    last_event_type: str | None = None
    last_node_name: str | None = None
    last_event_id: int | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    state: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def has_open_loop(self) -> bool:
        """True if a loop or fan-out has started and not ended."""
        return any(not entry["completed"] for entry in self._loops())

    def apply(self, events: Iterable[Mapping[str, Any]], done: Done) -> None:
        """Applies a batch of events in the order in which their transactions began.

        Successful iterations come as counts: however a log is divided into batches, the row is the same, because
        counts belong to a visit, and all starts of a visit's loop share one count.

        Args:
            events: rows of :data:`noetl_dagster.events.projection_queries.EVENTS`, including failures of iterations
                that will not be tried again.
            done: counts of the batch; those of known visits are applied first, others when their loop starts.
                Negative if more iterations lost a page than had their first one.
        """
        for entry in self._loops():
            entry["done"] += done.pop((entry["step"], entry["visit"]), 0)
        for event in events:
            self._take(event, done)

    def comparable(self) -> dict[str, Any]:
        """Returns the columns that do not depend on how the log was divided into batches."""
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.state.get("resumptions"):
            columns["state"] = state = {**self.state}
            for kind in ("loop", "fanout"):
                state[kind] = {
                    step: entry if entry["completed"] else {**entry, "done": None}
                    for step, entry in self.state.get(kind, {}).items()
                }
        return columns

    def _take(self, event: Mapping[str, Any], done: Done) -> None:
        handler = _HANDLERS.get(event["event_type"])
        if handler is None:
            return
        handler(self, event, done)
        self.created_at = self.created_at or event["created_at"]
        self.updated_at = max(self.updated_at or event["created_at"], event["created_at"])
        if event["event_type"] not in _COUNTED and event["event_id"] >= (self.last_event_id or 0):
            self.last_event_id = event["event_id"]
            self.last_event_type = event["event_type"]
            self.last_node_name = event["node_name"]

    def _initialized(self, event: Mapping[str, Any], done: Done) -> None:
        self.catalog_id = event["catalog_id"]
        self.parent_execution_id = event["parent_execution_id"]
        self.playbook = event["node_name"]
        self.start_time = event["created_at"]
        self.state["epoch"] = int(event["meta"].get("epoch", 1))
        self.state["run_id"] = event["meta"].get("dagster_run_id")
        self.state["workload"] = truncated(event["workload"] or {})

    def _resumed(self, event: Mapping[str, Any], done: Done) -> None:
        self.status, self.error, self.end_time = ExecutionStatus.RUNNING, None, None
        self.state["epoch"] = int(event["meta"]["epoch"])
        self.state["run_id"] = event["meta"].get("dagster_run_id")
        if self.state.get("steps"):  # not the run that the service launched for a new execution
            self.state["resumptions"] = self.state.get("resumptions", 0) + 1
        for entry in self._loops():
            if not entry["completed"]:  # its failed iterations are tried again
                entry["failed"] = 0
        for step in self.state.get("steps", []):
            if step.pop("unhandled", False):
                step["status"] = ExecutionStatus.RUNNING
                step.pop("error", None)

    def _ended(self, event: Mapping[str, Any], done: Done) -> None:
        self.status = STATUS_OF_END[event["event_type"]]
        self.end_time, self.error = event["created_at"], event["error"]
        if self.status is ExecutionStatus.CANCELLED:
            for step in self.state.get("steps", []):
                if step["status"] == ExecutionStatus.RUNNING:
                    step["status"] = ExecutionStatus.CANCELLED
            for fanout in self.state.get("fanout", {}).values():
                if not fanout["completed"]:
                    fanout["status"] = "cancelled"

    def _entered(self, event: Mapping[str, Any], done: Done) -> None:
        step = self._step(event["node_name"])
        step["visits"] = max(_visit(event), step["visits"])
        cancelled = self.status == ExecutionStatus.CANCELLED  # the driver had not read the cancellation
        step["status"] = ExecutionStatus.CANCELLED if cancelled else ExecutionStatus.RUNNING
        for key in ("error", "result", "unhandled"):
            step.pop(key, None)

    def _exited(self, event: Mapping[str, Any], done: Done) -> None:
        step = self._step(event["node_name"])
        unhandled = bool(event["meta"].get("unhandled"))
        is_late = unhandled and int(event["meta"].get("epoch", 1)) < self.state.get("epoch", 1)
        if is_late or _visit(event) < step["visits"]:
            return
        step["visits"] = _visit(event)
        step["status"] = event["status"]
        details = {"error": event["error"], "result": event["result_uri"], "unhandled": unhandled}
        step.update({key: value for key, value in details.items() if value})

    def _loop_started(self, event: Mapping[str, Any], done: Done) -> None:
        fanout = event["event_type"] == EventType.LOOP_FANOUT_STARTED
        meta, step, visit = event["meta"], event["node_name"], _visit(event)
        loops = self.state.setdefault("fanout" if fanout else "loop", {})
        before = loops.get(step)
        entry: dict[str, Any] = {
            "step": step,
            "visit": visit,
            "loop_id": meta.get("loop_id"),
            "done": before["done"] if before is not None and before["visit"] == visit else 0,
            "failed": 0,
            "completed": False,
        }
        if fanout:
            entry |= {"total_shards": int(meta.get("total_shards", 0)), "status": "running"}
        else:
            entry |= {
                "total": int(meta.get("collection_size", 0)),
                "mode": meta.get("mode", "sequential"),
                "collection_ref": event["collection_ref"],
            }
        entry["done"] += done.pop((step, visit), 0)
        loops[step] = entry

    def _iteration_failed(self, event: Mapping[str, Any], done: Done) -> None:
        if (entry := self._loop_of(event)) is not None:
            entry["failed"] += 1

    def _loop_done(self, event: Mapping[str, Any], done: Done) -> None:
        if (entry := self._loop_of(event)) is None:
            return
        meta, entry["completed"] = event["meta"], True
        if "done" in meta:
            entry["done"], entry["failed"] = int(meta["done"]), int(meta["failed"])
        if event["event_type"] == EventType.LOOP_FANIN_COMPLETED:
            entry["status"] = event["result_status"]
        elif "total" in meta:
            entry["total"] = int(meta["total"])  # cursor loops know their total only now

    def _warned(self, event: Mapping[str, Any], done: Done) -> None:
        warnings = self.state.setdefault("warnings", [])
        if len(warnings) < WARNINGS_KEPT:
            warnings.append(event["error"] or "")

    def _step(self, name: str) -> dict[str, Any]:
        steps = self.state.setdefault("steps", [])
        entry = next((step for step in steps if step["step"] == name), None)
        if entry is None:
            entry = {"step": name, "status": ExecutionStatus.RUNNING, "visits": 1}
            steps.append(entry)
        return entry

    def _loops(self) -> list[dict[str, Any]]:
        return [*self.state.get("loop", {}).values(), *self.state.get("fanout", {}).values()]

    def _loop_of(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        loop_id = event["meta"].get("loop_id")
        return next((entry for entry in self._loops() if entry["loop_id"] == loop_id), None)


def _visit(event: Mapping[str, Any]) -> int:
    return int(event["meta"].get("visit", 1))


_COUNTED = frozenset({EventType.COMMAND_FAILED, EventType.LOOP_SHARD_FAILED})

_HANDLERS = (
    {
        EventType.PLAYBOOK_INITIALIZED: ProjectedExecution._initialized,
        EventType.EXECUTION_RESUMED: ProjectedExecution._resumed,
        EventType.STEP_ENTER: ProjectedExecution._entered,
        EventType.STEP_EXIT: ProjectedExecution._exited,
        EventType.LOOP_STARTED: ProjectedExecution._loop_started,
        EventType.LOOP_FANOUT_STARTED: ProjectedExecution._loop_started,
        EventType.LOOP_DONE: ProjectedExecution._loop_done,
        EventType.LOOP_FANIN_COMPLETED: ProjectedExecution._loop_done,
        EventType.WARNING: ProjectedExecution._warned,
    }
    | dict.fromkeys(STATUS_OF_END, ProjectedExecution._ended)
    | dict.fromkeys(_COUNTED, ProjectedExecution._iteration_failed)
)
