"""Sends spans to a collector from a thread of its own, which begins with the first span.

Whoever records a span never waits: what a collector that is away or slow does not take is dropped.
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

from noetl_dagster.process.tracing.span import Span

logger = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Spans that wait to be sent, at most; some 20 MB."""

BATCH = 1_000
LINGER_SECONDS = 1.0
FLUSH_SECONDS = 3.0
"""A process that ends waits so long for a collector, once."""

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
"""Sends spans; gives what went wrong."""


class Exporter:
    """The spans for one collector. Use :func:`exporter_of`."""

    def __init__(self, endpoint: str, *, trusted: bool) -> None:
        self.endpoint = endpoint
        self._trusted = trusted
        self._warned = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets what another process, from which this one was forked, has to send; its thread is not here."""
        self._waiting: deque[Span] = deque()
        self._thread: threading.Thread | None = None
        self._some = threading.Event()
        self._hurry = threading.Event()
        self._sent = threading.Condition()
        self._adding = threading.Lock()
        self._begun = self._done = self.dropped = 0
        self._away = self._useless = False

    def add(self, spans: Sequence[Span]) -> None:
        """Hands spans over, or drops them where too many wait."""
        if self._useless or len(self._waiting) >= MOST_WAITING:
            self.dropped += len(spans)
            return
        with self._adding:
            self._waiting.extend(spans)
            self._begun += len(spans)
            if self._thread is None:
                self._start()
        if not self._some.is_set():
            self._some.set()
        if len(self._waiting) >= BATCH:
            self._hurry.set()

    def flush(self, deadline: float) -> None:
        """Waits until what was handed over is sent, or ``time.monotonic()`` is ``deadline``.

        A collector that is known to be away is not waited for.
        """
        wanted = self._begun
        self._hurry.set()
        with self._sent:
            while self._done < wanted and not self._away:
                left = deadline - time.monotonic()
                if left <= 0 or not self._sent.wait(left):
                    self._away = True

    @property
    def _shown(self) -> str:
        """The endpoint, without a password."""
        parts = urlsplit(self.endpoint)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="noetl-traces", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the interpreter is about to end
            self._useless = True

    def _work(self) -> None:
        send = self._open()
        while True:
            self._some.wait()
            self._hurry.wait(LINGER_SECONDS)
            self._some.clear()
            self._hurry.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                try:
                    wrong = send(batch) if send is not None else ""
                except Exception as error:  # a defect here, or in OpenTelemetry: the thread goes on
                    wrong = repr(error)
                with self._sent:
                    self._note(wrong, len(batch))
                    self._done += len(batch)
                    self._sent.notify_all()

    def _open(self) -> Send | None:
        try:
            with _importing:
                from noetl_dagster.process.tracing.otlp import opened
        except ImportError as error:
            self._useless = True
            logger.warning(
                "no traces are sent to %s: %s is not installed; pip install 'noetl-dagster[tracing]'",
                self._shown,
                error.name,
            )
            return None
        try:
            return opened(_url(self.endpoint), keep=None if self._trusted else _PLAIN_HEADERS)
        except Exception as error:  # a wrong variable of OpenTelemetry's
            self._useless = True
            logger.warning("no traces are sent to %s: %r; look at OTEL_EXPORTER_OTLP_*", self._shown, error)
            return None

    def _note(self, wrong: str | None, spans: int) -> None:
        self._away = wrong is not None
        if wrong is None:
            return
        self.dropped += spans
        if not self._warned and wrong:
            self._warned = True
            logger.warning(
                "%s does not take traces: %s; work goes on, spans are dropped (NOETL_TRACING_ENDPOINT, or "
                "tracing.endpoint of the playbook)",
                self._shown,
                wrong,
            )


def _url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def try_collector(endpoint: str, seconds: float) -> str | None:
    """Sends a collector nothing; what is wrong with it, None where it answers well.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    from noetl_dagster.process.tracing.otlp import opened

    return opened(_url(endpoint), seconds=seconds)([])


_exporters: dict[tuple[str, bool], Exporter] = {}
_lock = threading.Lock()


def exporter_of(endpoint: str, *, trusted: bool) -> Exporter:
    """This process's exporter for a collector."""
    with _lock:
        found = _exporters.get((endpoint, trusted))
        if found is None:
            found = _exporters[(endpoint, trusted)] = Exporter(endpoint, trusted=trusted)
        return found


def is_used() -> bool:
    """Whether this process has recorded anything."""
    return bool(_exporters)


def flush() -> None:
    """Waits for a moment until the spans of this process are sent."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for exporter in list(_exporters.values()):
        exporter.flush(deadline)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for exporter in _exporters.values():
        exporter.begin_anew()


_importing = threading.Lock()
"""A process that is forked in the middle of an import would have half a module for good."""

os.register_at_fork(
    before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
