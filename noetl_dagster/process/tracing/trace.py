"""The trace of one execution, as one process adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from noetl_dagster.process import about
from noetl_dagster.process.tracing.exporter import Exporter, exporter_of
from noetl_dagster.process.tracing.ids import TRACEPARENT, Position, is_sampled, span_id_of, trace_id_of
from noetl_dagster.process.tracing.span import Span

ORIGIN = "trace"
"""Part of ``playbook.initialized``'s meta: ``{"parent": traceparent}`` of a child, ``{"link": traceparent}``."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Trace:
    """A trace that is recorded; an execution that is not has none.

    Attributes:
        parent: span of another execution that this one belongs to; None for the root.
        link: of whoever asked for the execution.
        playbook, path: the playbook's name, and its path in the catalog.
        service: ``service.name`` of its spans; None: the process's own.
    """

    execution_id: int
    trace_id: int
    exporter: Exporter
    parent: int | None = None
    link: Position | None = None
    playbook: str = ""
    path: str = ""
    service: str | None = None

    def __post_init__(self) -> None:
        _live.setdefault(self.execution_id, self)

    def at(self, span_id: int) -> Position:
        return Position(self.trace_id, span_id)

    def execution_span(self, stops: int) -> int:
        """Of an execution that has stopped so many times before, and was resumed each time."""
        return span_id_of(f"{self.execution_id}/{stops}")

    def step_span(self, step: str, visit: int, ends: int) -> int:
        """Of a visit that has ended so many times before."""
        return span_id_of(f"{self.execution_id}:{step}:{visit}/{ends}")

    def record(self, *spans: Span) -> None:
        """Hands spans over to be sent."""
        for span in spans:
            span.attributes["noetl.execution_id"] = str(self.execution_id)
            span.service = self.service
        self.exporter.add(spans)


_live: WeakValueDictionary[int, Trace] = WeakValueDictionary()
"""The traces that this process adds to, by execution."""


def open_trace(
    execution_id: int,
    *,
    endpoint: str,
    sampling: float,
    trusted: bool,
    origin: Mapping[str, Any],
    is_child: bool,
    playbook: str,
    path: str,
    service: str | None = None,
) -> Trace | None:
    """The trace of an execution; None where it is not recorded.

    A child's is its parent's, so it has none where its parent has none.

    Args:
        endpoint: base URL of a collector that takes OTLP over HTTP.
        sampling: share of the executions that are recorded, 0..1.
        trusted: the endpoint may be sent the headers of ``OTEL_EXPORTER_OTLP_HEADERS``.
        origin: what :data:`ORIGIN` has of it.
    """
    link = Position.parse(str(origin.get("link", "")))
    if is_child:
        above = Position.parse(str(origin.get("parent", "")))
        if above is None:
            return None
        trace_id, parent = above.trace_id, above.span_id
    else:
        trace_id, parent = trace_id_of(execution_id), None
        if not is_sampled(trace_id, sampling):
            return None
    exporter = exporter_of(endpoint, trusted=trusted)
    return Trace(execution_id, trace_id, exporter, parent, link, playbook, path, service)


def names(position: Position) -> dict[str, str]:
    """What log lines say of the span that is under way; see :mod:`noetl_dagster.process.about`."""
    return {"trace_id": f"{position.trace_id:032x}", "span_id": f"{position.span_id:016x}"}


def headers() -> dict[str, str]:
    """The header for a request that is sent here and now; nothing where no trace is recorded."""
    known = about.known()
    if "trace_id" not in known:
        return {}
    return {TRACEPARENT: f"00-{known['trace_id']}-{known['span_id']}-01"}


def headers_about(execution_id: int, command_id: str | None) -> dict[str, str]:
    """The header for a message about a command, or about the execution as a whole."""
    trace = _live.get(execution_id) if _live else None
    if trace is None:
        return {}
    span_id = trace.execution_span(0) if command_id is None else span_id_of(command_id)
    return {TRACEPARENT: trace.at(span_id).traceparent}


def origin_of_child() -> dict[str, Any]:
    """What a child that the present command starts keeps of its parent's trace.

    The parent is the command, whose span is there also when another process runs the command again.
    """
    known = about.known()
    if "trace_id" not in known or known.get("command_id") is None:
        return {}
    position = Position(int(known["trace_id"], 16), span_id_of(known["command_id"]))
    return {ORIGIN: {"parent": position.traceparent}}


def origin_of_request(header: str | None) -> dict[str, Any]:
    """What an execution keeps of the request that asked for it: a link, since it outlives the request."""
    position = Position.parse(header or "")
    return {} if position is None else {ORIGIN: {"link": position.traceparent}}
