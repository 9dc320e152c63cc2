"""Sends spans to a collector from a separate thread, which starts with the first span.

Recording a span never waits. Spans are dropped if the collector is unavailable or too slow.

OpenTelemetry's ``BatchSpanProcessor`` does not fit. Its ``force_flush`` ignores the time limit, so a process could not
end while the collector is unavailable. It must also be imported in the thread that records spans, where a fork may
interrupt the import.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from noetl_dagster.extras import needs_extra
from noetl_dagster.process.tracing.spans import Span

logger = logging.getLogger(__name__)

MAX_WAITING = 20_000
"""Spans that wait to be sent, about 20 MB."""

BATCH = 1_000
LINGER_SECONDS = 1.0
FLUSH_SECONDS = 3.0
"""Time that a process waits for a collector before it ends."""

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

Send = Callable[[Sequence[Span]], str | None]
"""Sends spans, and returns the error or None."""


class Exporter:
    """Sends spans to one collector, and counts the spans that it drops. Use :func:`exporter_of`."""

    def __init__(self, endpoint: str, *, trusted: bool) -> None:
        self.endpoint = endpoint
        self._trusted = trusted
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Forgets the spans and the thread of the process from which this one was forked."""
        self._waiting: deque[Span] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._added = self._done = self.dropped = 0
        self._flushing = self._unavailable = self._disabled = False

    def add(self, spans: Sequence[Span]) -> None:
        """Queues spans; drops them if too many are waiting."""
        with self._changed:
            if self._disabled or len(self._waiting) >= MAX_WAITING:
                self.dropped += len(spans)
                return
            if not self._waiting or len(self._waiting) + len(spans) >= BATCH:
                self._changed.notify_all()
            self._waiting.extend(spans)
            self._added += len(spans)
            if self._thread is None:
                self._start()

    def flush(self, deadline: float) -> None:
        """Waits until all queued spans are sent, or ``time.monotonic()`` reaches ``deadline``.

        Does not wait for a collector that is known to be unavailable.
        """
        with self._changed:
            wanted, self._flushing = self._added, True
            self._changed.notify_all()
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._done >= wanted or self._unavailable, left):
                self._unavailable = True

    @property
    def _shown(self) -> str:
        """The endpoint without its password."""
        parts = urlsplit(self.endpoint)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def _start(self) -> None:
        thread = threading.Thread(target=self._send_batches, name="noetl-traces", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the interpreter is shutting down
            self._disabled = True

    def _send_batches(self) -> None:
        send = self._open_sender()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._changed.wait_for(lambda: self._flushing or len(self._waiting) >= BATCH, LINGER_SECONDS)
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                self._flushing = self._flushing and bool(self._waiting)
            try:
                error_text = send(batch) if send is not None else ""
            except Exception as error:  # a defect here or in OpenTelemetry must not end the thread
                error_text = repr(error)
            with self._changed:
                self._record_outcome(error_text, len(batch))
                self._done += len(batch)
                self._changed.notify_all()

    def _open_sender(self) -> Send | None:
        try:
            with _importing:
                from noetl_dagster.process.tracing.otlp import open_sender
            return open_sender(_url(self.endpoint), keep=None if self._trusted else _PLAIN_HEADERS)
        except ImportError as error:
            why = f"{error.name} is not installed; {needs_extra('tracing', 'tracing')}"
        except Exception as error:  # an invalid OTEL_EXPORTER_OTLP_* variable
            why = f"{error!r}; look at OTEL_EXPORTER_OTLP_*"
        self._disabled = True
        logger.warning("no traces are sent to %s: %s", self._shown, why)
        return None

    def _record_outcome(self, error_text: str | None, spans: int) -> None:
        self._unavailable = error_text is not None
        self.dropped += spans if self._unavailable else 0
        if error_text and not self._warned:
            self._warned = True
            logger.warning(
                "%s does not take traces: %s; work continues without them (NOETL_TRACING_ENDPOINT, or "
                "tracing.endpoint of the playbook)",
                self._shown,
                error_text,
            )


def _url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def try_collector(endpoint: str, seconds: float) -> str | None:
    """Sends an empty request to a collector, and returns the error or None; needs OpenTelemetry."""
    from noetl_dagster.process.tracing.otlp import open_sender

    return open_sender(_url(endpoint), seconds=seconds)([])


_exporters: dict[tuple[str, bool], Exporter] = {}
_lock = threading.Lock()


def exporter_of(endpoint: str, *, trusted: bool) -> Exporter:
    """Returns this process's exporter for a collector."""
    with _lock:
        found = _exporters.get((endpoint, trusted))
        if found is None:
            found = _exporters[(endpoint, trusted)] = Exporter(endpoint, trusted=trusted)
        return found


def is_used() -> bool:
    """Returns True if this process has recorded a span."""
    return bool(_exporters)


def flush() -> None:
    """Waits at most :data:`FLUSH_SECONDS` until the spans of this process are sent."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for exporter in list(_exporters.values()):
        exporter.flush(deadline)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for exporter in _exporters.values():
        exporter.reset()


_importing = threading.Lock()
"""Prevents a fork during the import, which would leave the child with half a module."""

os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
