"""Traces of executions, sent as spans over OTLP; context travels as a header (W3C Trace Context).

The event that ends something also records its span. Ids are functions of names, so drivers, helper processes, workers
on other machines and resumed runs add to one trace without coordination. While tracing is off, OpenTelemetry is not
imported and no thread runs.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from noetl_dagster.extras import needs_extra
from noetl_dagster.process.logs import current_fields
from noetl_dagster.process.spans import TRACEPARENT, Span, SpanRef, is_sampled, span_id_of, trace_id_of
from noetl_dagster.setting_types import without_login

if TYPE_CHECKING:
    from noetl_dagster.process.otlp import Collector

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
"""Time that a process waits for a collector before it ends."""

ORIGIN = "trace"
"""Part of ``playbook.initialized``'s meta: ``{"parent": traceparent}`` of a child, ``{"link": traceparent}``."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Trace:
    """A sampled trace. Executions that are not sampled have no trace.

    Attributes:
        parent: span of the parent execution; None for a root.
        link: span of the request that started the execution.
        playbook, path: the playbook's name, and its path in the catalog.
        service: ``service.name`` of its spans; None uses the name of the process.
    """

    execution_id: int
    trace_id: int
    collector: Collector
    parent: int | None = None
    link: SpanRef | None = None
    playbook: str = ""
    path: str = ""
    service: str | None = None

    def __post_init__(self) -> None:
        _live.setdefault(self.execution_id, self)

    def at(self, span_id: int) -> SpanRef:
        """Returns the reference of a span in this trace."""
        return SpanRef(self.trace_id, span_id)

    def execution_span(self, stops: int) -> int:
        """Returns the span id of an execution that was stopped and resumed ``stops`` times before."""
        return span_id_of(f"{self.execution_id}/{stops}")

    def step_span(self, step: str, visit: int, ends: int) -> int:
        """Returns the span id of a visit that has ended ``ends`` times before."""
        return span_id_of(f"{self.execution_id}:{step}:{visit}/{ends}")

    def record(self, *spans: Span) -> None:
        """Queues spans to be sent."""
        for span in spans:
            span.attributes["noetl.execution_id"] = str(self.execution_id)
            span.service = self.service
        self.collector.add(spans)


_live: WeakValueDictionary[int, Trace] = WeakValueDictionary()
"""The traces to which this process adds spans, by execution."""


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
    """Opens the trace of an execution.

    Args:
        endpoint: base URL of a collector that accepts OTLP over HTTP.
        sampling: share of the executions that is recorded, 0..1.
        trusted: the endpoint may receive the headers of ``OTEL_EXPORTER_OTLP_HEADERS``.
        origin: the value stored under :data:`ORIGIN`.

    Returns:
        None if the execution is not sampled, or OpenTelemetry is not installed. A child execution belongs to the trace
        of its parent.
    """
    link = SpanRef.parse(str(origin.get("link", "")))
    if is_child:
        above = SpanRef.parse(str(origin.get("parent", "")))
        if above is None:
            return None
        trace_id, parent = above.trace_id, above.span_id
    else:
        trace_id, parent = trace_id_of(execution_id), None
        if not is_sampled(trace_id, sampling):
            return None
    collector = collector_of(endpoint, trusted=trusted)
    if collector is None:
        return None
    return Trace(execution_id, trace_id, collector, parent, link, playbook, path, service)


def log_fields(span: SpanRef) -> dict[str, str]:
    """Returns the log fields of a span; see :mod:`noetl_dagster.process.logs`."""
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}


def headers() -> dict[str, str]:
    """Returns the header for a request that is sent here and now; empty if no trace is recorded."""
    fields = current_fields()
    if "trace_id" not in fields:
        return {}
    return {TRACEPARENT: f"00-{fields['trace_id']}-{fields['span_id']}-01"}


def headers_about(execution_id: int, command_id: str | None) -> dict[str, str]:
    """Returns the header for a message about a command, or about the execution as a whole."""
    trace = _live.get(execution_id) if _live else None
    if trace is None:
        return {}
    span_id = trace.execution_span(0) if command_id is None else span_id_of(command_id)
    return {TRACEPARENT: trace.at(span_id).traceparent}


def origin_of_child() -> dict[str, Any]:
    """Returns the origin of a child execution that the current command starts.

    The parent is the span of the command, since that exists even if another process runs the command again.
    """
    fields = current_fields()
    if "trace_id" not in fields or fields.get("command_id") is None:
        return {}
    command = SpanRef(int(fields["trace_id"], 16), span_id_of(fields["command_id"]))
    return {ORIGIN: {"parent": command.traceparent}}


def origin_of_request(header: str | None) -> dict[str, Any]:
    """Returns the origin of an execution that a request starts: a link, since the execution outlives the request."""
    request = SpanRef.parse(header or "")
    return {} if request is None else {ORIGIN: {"link": request.traceparent}}


_collectors: dict[tuple[str, bool], Collector | None] = {}
_opening = threading.Lock()
"""Also prevents a fork during the import of OpenTelemetry, which would leave the child with half a module."""

os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release)


def collector_of(endpoint: str, *, trusted: bool) -> Collector | None:
    """Returns this process's connection to a collector; None if there can be none, which is logged once."""
    with _opening:
        key = endpoint, trusted
        if key not in _collectors:
            _collectors[key] = _open_collector(endpoint, trusted)
        return _collectors[key]


def _open_collector(endpoint: str, trusted: bool) -> Collector | None:
    try:
        from noetl_dagster.process.otlp import Collector

        return Collector(endpoint, trusted=trusted)
    except ImportError as error:
        why = f"{error.name} is not installed; {needs_extra('tracing', 'tracing')}"
    except Exception as error:  # an invalid OTEL_EXPORTER_OTLP_* variable; the interpreter is shutting down
        why = f"{error!r}; look at OTEL_EXPORTER_OTLP_*"
    logger.warning("no traces are sent to %s: %s", without_login(endpoint), why)
    return None


def is_used() -> bool:
    """Returns True if this process has opened a trace."""
    return bool(_collectors)


def flush() -> None:
    """Sends the spans of this process, for about :data:`FLUSH_SECONDS` at most."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for collector in list(_collectors.values()):
        if collector is not None:
            collector.flush(deadline)


atexit.register(flush)
