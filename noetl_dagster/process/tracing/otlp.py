"""Converts spans for OpenTelemetry and sends them with its exporter.

Only this module imports OpenTelemetry. It is imported in the thread of the exporter.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from noetl_dagster.process.tracing.spans import Span, SpanRef

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("noetl_dagster", version("noetl-dagster"))
_SOURCES = ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http")


class _CapturedLog(logging.Filter):
    """Captures the log of the library in this thread. The caller warns once instead."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.message = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.message = record.getMessage()
        return False


def open_sender(
    url: str, *, keep: frozenset[str] | None = None, seconds: float | None = None
) -> Callable[[Sequence[Span]], str | None]:
    """Returns a function that sends spans to ``url`` from this thread, and returns the error or None.

    Args:
        keep: names of the only headers that may be sent; None allows all.
        seconds: time limit including retries; None uses the variables ``OTEL_EXPORTER_OTLP_*``, as all else does.
    """
    session = requests.Session()
    if keep is not None:
        session.auth = partial(_drop_headers, keep)
    exporter = OTLPSpanExporter(endpoint=url, session=session, timeout=seconds)
    captured = _CapturedLog()
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(_SOURCES):
            logging.getLogger(name).addFilter(captured)

    def send(spans: Sequence[Span]) -> str | None:
        captured.message = ""
        try:
            result = exporter.export([_readable(span) for span in spans])
        except Exception as error:
            return repr(error)
        return None if result is SpanExportResult.SUCCESS else captured.message or "it failed"

    return send


def _drop_headers(keep: frozenset[str], request: requests.PreparedRequest) -> requests.PreparedRequest:
    for name in [name for name in request.headers if name.lower() not in keep]:
        del request.headers[name]
    return request


def _readable(span: Span) -> ReadableSpan:
    own = _context(span.ref)
    failure = span.failure
    return ReadableSpan(
        span.name,
        own,
        None if span.parent is None else _context(SpanRef(span.ref.trace_id, span.parent)),
        _resource(os.getpid(), span.service),
        span.attributes if failure is None else {**span.attributes, "error.type": failure.kind},
        links=() if span.link is None else (Link(_context(span.link)),),
        kind=SpanKind.CLIENT if span.client else SpanKind.INTERNAL,
        status=_UNSET if failure is None else Status(StatusCode.ERROR, failure.message),
        start_time=span.start,
        end_time=max(span.end, span.start),
        instrumentation_scope=_SCOPE,
    )


def _context(span: SpanRef) -> SpanContext:
    return SpanContext(*span, is_remote=False, trace_flags=_SAMPLED)


@cache
def _resource(process: int, service: str | None) -> Resource:
    """Describes this process. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` take precedence."""
    attributes: dict[str, Any] = {"host.name": socket.gethostname(), "process.pid": process}
    named = Resource.create(attributes)
    default = str(named.attributes.get("service.name", "")).startswith("unknown_service")
    if service is None and not default:
        return named
    return named.merge(Resource({"service.name": service or "noetl-dagster"}))
