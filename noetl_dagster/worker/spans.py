"""Spans of an execution, its steps, its commands, and their calls of tools.

Each is recorded at its end by the process that ran it, so that work that is killed and repeated has one span. A command
that ran twice, for example because a claim had expired, has two spans with one id.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence

from noetl_dagster.errors import Place
from noetl_dagster.events.envelopes import OK, Envelope
from noetl_dagster.events.ids import snowflake_milliseconds
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.models import Playbook, Task
from noetl_dagster.process.logs import LogContext, current_fields
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.process.spans import Attributes, Span, SpanFailure, any_span_id, span_id_of
from noetl_dagster.process.tracing import Trace, log_fields, open_trace
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.worker.command import Command, Outcome

MOST_CALLS = 1_000
"""Calls of tools that are recorded for one command; its own span has their number."""

_DATABASES = {"postgres": "postgresql", "bigquery": "gcp.bigquery"} | {
    kind: kind for kind in ("duckdb", "ducklake", "mysql", "sqlite", "snowflake")
}


def trace_of(settings: Settings, playbook: Playbook, state: ExecutionState) -> Trace | None:
    """Returns the trace of an execution, or None if none is recorded."""
    own = playbook.tracing
    endpoint = own.endpoint or settings.tracing_endpoint
    if not endpoint or not own.enabled:
        return None
    return open_trace(
        state.execution_id,
        endpoint=endpoint,
        sampling=settings.tracing_sampling if own.sampling is None else own.sampling,
        trusted=endpoint == settings.tracing_endpoint,
        origin=state.trace,
        is_child=state.parent_execution_id is not None,
        playbook=playbook.name,
        path=playbook.metadata.path,
        service=own.service_name,
    )


class CommandSpan:
    """The span of a command that runs here, and those of its calls of tools, all recorded when it has ended."""

    def __init__(self, trace: Trace, parent: int, command: Command) -> None:
        self._trace = trace
        self._parent = parent
        self._command = command
        self._start = time.time_ns()
        self._position = trace.at(span_id_of(command.command_id))
        self._calls: list[Span] = []
        self._count = 0

    @property
    def names(self) -> dict[str, str]:
        """The log fields of the command while it runs."""
        return log_fields(self._position)

    async def called(
        self, task: Task, attempt: int, call: Awaitable[tuple[Envelope, float | None]]
    ) -> tuple[Envelope, float | None]:
        """Awaits a call of a tool, and records it unless it is interrupted."""
        position, start = self._trace.at(any_span_id()), time.time_ns()
        with LogContext(**{**current_fields(), **log_fields(position)}):
            envelope, retry_after = await call
        self._count += 1
        if self._count <= MOST_CALLS:
            own = Span(
                position,
                self._position.span_id,
                f"{self._command.step}.{task.name if task.named else task.kind}",
                start,
                time.time_ns(),
                _of_call(task, attempt, envelope) | _place(task.place),
                _failure(envelope),
                client=task.kind == "http" or task.kind in _DATABASES,
            )
            self._calls.append(own)
        return envelope, retry_after

    def ended(self, outcome: Outcome, worker_id: str) -> None:
        """Records the command with its calls."""
        attributes = _of_command(self._command, worker_id) | _of_result(outcome.envelope)
        attributes["noetl.calls"] = self._count
        name, failure = f"{self._command.step} command", _failure(outcome.envelope)
        own = Span(self._position, self._parent, name, self._start, time.time_ns(), attributes, failure)
        self._trace.record(*self._calls, own)


def step_span(trace: Trace, state: ExecutionState, step: str, visit: int) -> int:
    """Returns the id of the span of a visit that is in progress."""
    return trace.step_span(step, visit, state.exits.get((step, visit), 0))


def step_names(trace: Trace | None, state: ExecutionState, step: str, visit: int) -> dict[str, str]:
    """Returns the log fields of a visit's span; empty if no trace is recorded."""
    return {} if trace is None else log_fields(trace.at(step_span(trace, state, step, visit)))


def step_ended(trace: Trace, playbook: Playbook, state: ExecutionState, end: Event) -> None:
    """Records a visit whose end has been written and is not in the state yet."""
    step, visit = end.node_name or "", int(end.meta["visit"])
    attributes = _of_end(trace, state, end) | _place(playbook.step(step).place)
    result = end.result or {}
    if "total" in (result.get("context") or {}):
        attributes["noetl.items"] = int(result["context"]["total"])
    _record_step(trace, state, step, visit, attributes, _failure_of(end))


def execution_ended(trace: Trace, state: ExecutionState, end: Event) -> None:
    """Records an execution and its steps without an end. Its end is written and not in the state yet."""
    failure = _failure_of(end)
    kind = "interrupted" if failure is None else failure.kind
    for step, visit in state.entered:
        lost = SpanFailure(kind, "it ended with its execution")
        _record_step(trace, state, step, visit, _of_end(trace, state, end), lost)
    attributes = _of_end(trace, state, end)
    if state.partition is not None:
        attributes["noetl.partition"] = str(state.partition["key"])
    parent, name = trace.parent, state.playbook
    if state.stops:  # the part before was recorded when it stopped
        parent, name = trace.execution_span(0), f"{state.playbook} resumed"
    own, began = trace.at(trace.execution_span(state.stops)), _nanoseconds(state.began)
    trace.record(Span(own, parent, name, began, time.time_ns(), attributes, failure, link=trace.link))


def commands_cancelled(trace: Trace, state: ExecutionState, begun: Sequence[Event], reason: str) -> None:
    """Records commands that ended with their execution, in any process; from their ``command.claimed`` on."""
    for event in begun:
        command = Command.of(event)
        trace.record(
            Span(
                trace.at(span_id_of(command.command_id)),
                step_span(trace, state, command.step, command.visit),
                f"{command.step} command",
                _nanoseconds(event.event_id),
                time.time_ns(),
                _of_command(command, event.worker_id or ""),
                SpanFailure("cancelled", reason),
            )
        )


def _record_step(
    trace: Trace, state: ExecutionState, step: str, visit: int, more: Attributes, failure: SpanFailure | None
) -> None:
    now, entered = time.time_ns(), state.entered.get((step, visit))
    own, parent = trace.at(step_span(trace, state, step, visit)), trace.execution_span(state.stops)
    start = now if entered is None else _nanoseconds(entered)
    attributes: Attributes = {"noetl.step": step, "noetl.visit": visit, **more}
    trace.record(Span(own, parent, step, start, now, attributes, failure))


def _of_end(trace: Trace, state: ExecutionState, end: Event) -> Attributes:
    attributes: Attributes = {
        "noetl.playbook": trace.playbook,
        "noetl.path": trace.path,
        "noetl.status": end.status or "",
        "noetl.epoch": state.epoch,
    }
    if state.run_id is not None:
        attributes["dagster.run_id"] = state.run_id
    return attributes


def _of_command(command: Command, worker_id: str) -> Attributes:
    attributes: Attributes = {
        "noetl.step": command.step,
        "noetl.visit": command.visit,
        "noetl.command_id": command.command_id,
        "noetl.attempt": command.attempt,
        "noetl.worker_id": worker_id,
    }
    if command.index is not None:
        attributes["noetl.index"] = command.index
    return attributes


def _of_call(task: Task, attempt: int, envelope: Envelope) -> Attributes:
    attributes: Attributes = {"noetl.tool": task.kind, "noetl.task": task.name, "noetl.attempt": attempt}
    if task.kind in _DATABASES:
        attributes["db.system.name"] = _DATABASES[task.kind]
    elif task.kind == "nats":
        attributes["messaging.system"] = "nats"
    elif task.kind == "http":
        method = str(task.config.get("method") or "GET").upper()
        if "{" not in method:
            attributes["http.request.method"] = method
        status = (envelope.get("http") or {}).get("status")
        if status is not None:
            attributes["http.response.status_code"] = int(status)
        data = envelope.get("data")
        if isinstance(data, dict) and isinstance(data.get("url"), str):
            attributes["url.full"] = data["url"]
    sqlstate = (envelope.get("pg") or {}).get("sqlstate")
    if sqlstate:
        attributes["db.response.status_code"] = str(sqlstate)
    return attributes | _of_result(envelope)


def _of_result(envelope: Envelope) -> Attributes:
    """Returns bytes and rows of a result, if it has any."""
    attributes: Attributes = {}
    ref: ResultRef | None = envelope.get("ref")
    data, rows = envelope.get("data"), None
    if ref is not None:
        attributes["noetl.result.bytes"] = ref.bytes_size
        rows = ref.rows
    elif isinstance(data, list):
        rows = len(data)
    elif isinstance(data, dict):
        rows = data.get("row_count")
    if isinstance(rows, int):
        attributes["noetl.result.rows"] = rows
    return attributes


def _place(place: Place | None) -> Attributes:
    return {} if place is None else {"code.file.path": place.file, "code.line.number": place.line}


def _failure(envelope: Envelope) -> SpanFailure | None:
    if envelope["status"] == OK:
        return None
    error = envelope.get("error") or {}
    return SpanFailure(str(error.get("kind", "unknown")), SECRETS.redact(str(error.get("message", ""))))


def _failure_of(end: Event) -> SpanFailure | None:
    if end.error is None:
        return None
    error = ((end.result or {}).get("context") or {}).get("error") or {}
    kind = "cancelled" if end.status == ExecutionStatus.CANCELLED else str(error.get("kind", "playbook"))
    return SpanFailure(kind, SECRETS.redact(end.error))


def _nanoseconds(event_id: int) -> int:
    return snowflake_milliseconds(event_id) * 1_000_000
