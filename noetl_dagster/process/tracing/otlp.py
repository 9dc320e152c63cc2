"""Spans as OpenTelemetry has them, and its exporter. The one module that imports it, in the exporter's thread."""

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

from noetl_dagster.process.tracing.ids import Position
from noetl_dagster.process.tracing.span import Span

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("noetl_dagster", version("noetl-dagster"))
_SOURCES = ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http")


class _Kept(logging.Filter):
    """Keeps what the library logs in this thread to ourselves, who warn once."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.said = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.said = record.getMessage()
        return False


def opened(
    url: str, *, keep: frozenset[str] | None = None, seconds: float | None = None
) -> Callable[[Sequence[Span]], str | None]:
    """A function that sends spans to ``url`` from this thread and gives what went wrong.

    ``OTEL_EXPORTER_OTLP_*`` are heeded.

    Args:
        keep: names of the only headers that may be sent; None: all.
        seconds: for an answer, with what is tried again; None: as OpenTelemetry's variables say.
    """
    session = requests.Session()
    if keep is not None:
        session.auth = partial(_only, keep)
    exporter = OTLPSpanExporter(endpoint=url, session=session, timeout=seconds)
    kept = _Kept()
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(_SOURCES):
            logging.getLogger(name).addFilter(kept)

    def send(spans: Sequence[Span]) -> str | None:
        kept.said = ""
        try:
            result = exporter.export([_readable(span) for span in spans])
        except Exception as error:
            return repr(error)
        return None if result is SpanExportResult.SUCCESS else kept.said or "it failed"

    return send


def _only(keep: frozenset[str], request: requests.PreparedRequest) -> requests.PreparedRequest:
    for name in [name for name in request.headers if name.lower() not in keep]:
        del request.headers[name]
    return request


def _readable(span: Span) -> ReadableSpan:
    own = _context(span.position)
    failure = span.failure
    return ReadableSpan(
        span.name,
        own,
        None if span.parent is None else _context(Position(span.position.trace_id, span.parent)),
        _resource(os.getpid(), span.service),
        span.attributes if failure is None else {**span.attributes, "error.type": failure.kind},
        links=() if span.link is None else (Link(_context(span.link)),),
        kind=SpanKind.CLIENT if span.client else SpanKind.INTERNAL,
        status=_UNSET if failure is None else Status(StatusCode.ERROR, failure.message),
        start_time=span.start,
        end_time=max(span.end, span.start),
        instrumentation_scope=_SCOPE,
    )


def _context(position: Position) -> SpanContext:
    return SpanContext(*position, is_remote=False, trace_flags=_SAMPLED)


@cache
def _resource(process: int, service: str | None) -> Resource:
    """Who speaks; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say more, and go before our own name."""
    attributes: dict[str, Any] = {"host.name": socket.gethostname(), "process.pid": process}
    named = Resource.create(attributes)
    default = str(named.attributes.get("service.name", "")).startswith("unknown_service")
    if service is None and not default:
        return named
    return named.merge(Resource({"service.name": service or "noetl-dagster"}))
