"""Sends spans to a collector with OpenTelemetry's batch processor and exporter.

Only this module imports OpenTelemetry. It is imported when the first trace is opened.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - requests imports it and netrc while it sends, where a fork may interrupt that
import logging
import netrc  # noqa: F401
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from noetl_dagster.process.spans import Span, SpanRef
from noetl_dagster.setting_types import without_login

logger = logging.getLogger(__name__)

MAX_WAITING = 20_000
"""Spans that wait to be sent, about 20 MB; further ones replace the oldest."""

BATCH = 1_000
LINGER_SECONDS = 1.0
SEND_SECONDS = 3.0
"""Time limit of a batch with its retries, unless ``OTEL_EXPORTER_OTLP_TIMEOUT`` names another."""

_PATH = "/v1/traces"
_PLAIN_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "user-agent",
    }
)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("noetl_dagster", version("noetl-dagster"))
_HOST = Resource.create({"host.name": socket.gethostname()})
_SOURCES = ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http")


class Collector:
    """A collector of traces. Adding spans never waits and never fails; spans that it does not accept are dropped."""

    def __init__(self, endpoint: str, *, trusted: bool) -> None:
        """Starts the thread that sends.

        Args:
            endpoint: base URL.
            trusted: it may receive the headers of ``OTEL_EXPORTER_OTLP_HEADERS``.
        """
        self._exporter = _Exporter(endpoint, trusted=trusted)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_WAITING,
            schedule_delay_millis=LINGER_SECONDS * 1000,
            max_export_batch_size=BATCH,
        )

    def add(self, spans: Sequence[Span]) -> None:
        """Queues spans."""
        for span in spans:
            self._processor.on_end(_readable(span))

    def flush(self, deadline: float) -> None:
        """Sends the queued spans; after ``deadline`` (``time.monotonic()``), or if sending fails, drops them."""
        if self._exporter.is_away:
            return
        self._exporter.deadline = deadline
        try:
            self._processor.force_flush()
        finally:
            self._exporter.deadline = None


class _Exporter(SpanExporter):
    """Sends batches, and warns once if the collector does not accept them."""

    def __init__(self, endpoint: str, *, trusted: bool, seconds: float | None = None) -> None:
        self.is_away = False
        self.deadline: float | None = None
        self._endpoint = endpoint
        self._trusted = trusted
        self._seconds = seconds
        self._warned = False
        self._open()

    def _open(self) -> None:
        self._process, base, seconds = os.getpid(), self._endpoint.rstrip("/"), self._seconds
        session = requests.Session()
        if not self._trusted:
            session.auth = _drop_headers
        if seconds is None and not os.environ.keys() & {OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT}:
            seconds = SEND_SECONDS
        url = base if base.endswith(_PATH) else base + _PATH
        self._exporter = OTLPSpanExporter(endpoint=url, session=session, timeout=seconds)
        for name in list(logging.Logger.manager.loggerDict):
            if name.startswith(_SOURCES):
                logging.getLogger(name).addFilter(_is_logged)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.deadline is not None and (self.is_away or time.monotonic() >= self.deadline):
            return SpanExportResult.FAILURE
        if self._process != os.getpid():  # the connections are those of the process from which this one was forked
            self._open()
        error = self.send(spans)
        self.is_away = error is not None
        if error is not None and not self._warned:
            self._warned = True
            logger.warning(
                "%s does not take traces: %s; work continues without them (NOETL_TRACING_ENDPOINT, or "
                "tracing.endpoint of the playbook)",
                without_login(self._endpoint),
                error,
            )
        return SpanExportResult.SUCCESS if error is None else SpanExportResult.FAILURE

    def send(self, spans: Sequence[ReadableSpan]) -> str | None:
        """Sends spans, and returns the error or None."""
        _sending.message = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # a defect of OpenTelemetry must not fail a run
            return repr(error)
        finally:
            message = vars(_sending).pop("message")
        return None if result is SpanExportResult.SUCCESS else message or "it failed"


_sending = threading.local()


def _is_logged(record: logging.LogRecord) -> bool:
    """Keeps the library's log of a thread that sends, since the caller warns once instead."""
    if not hasattr(_sending, "message"):
        return True
    _sending.message = record.getMessage()
    return False


def try_collector(endpoint: str, seconds: float) -> str | None:
    """Sends an empty request to a collector, and returns the error or None."""
    return _Exporter(endpoint, trusted=True, seconds=seconds).send([])


def _drop_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    for name in [name for name in request.headers if name.lower() not in _PLAIN_HEADERS]:
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
    attributes: dict[str, Any] = {"process.pid": process}
    if service is not None or str(_HOST.attributes.get("service.name", "")).startswith("unknown_service"):
        attributes["service.name"] = service or "noetl-dagster"
    return _HOST.merge(Resource(attributes))
