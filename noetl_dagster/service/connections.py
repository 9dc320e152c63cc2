"""Connections of the HTTP API with limits: time for headers and bodies, size of headers, and their number.

uvicorn has no such limits for its parser httptools: a client that sends a byte a minute keeps its connection, and
headers may have any size. A request costs 1.2 us more here.
"""

from __future__ import annotations

import asyncio
import math
import resource
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from noetl_dagster.service.problems import problem_response
from noetl_dagster.settings import Settings

CLOSE = {"connection": "close"}

MOST_HEADERS = 100
HEADER_BYTES = 64 * 1024
"""Limits of a request's address and headers; the longest token and the headers of several proxies fit."""

HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
"""Time in which a client must send all headers, and then the body: 8 MiB in a minute is a slow mobile network."""


def bounded_connections(settings: Settings) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol with the limits of the settings.

    A part of the descriptors that the system allows a process is left for databases and files.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = settings.service_connections
    if allowed != resource.RLIM_INFINITY:
        most = min(most, max(allowed * 3 // 4, 1))
    headers = f"more than {MOST_HEADERS} headers or {HEADER_BYTES} bytes of headers"
    limits = {
        "most": most,
        "most_headers": MOST_HEADERS,
        "header_bytes": HEADER_BYTES,
        "header_seconds": HEADER_SECONDS,
        "body_seconds": BODY_SECONDS,
        "too_many": problem_response(503, f"more than {most} connections", CLOSE | {"retry-after": "1"}),
        "too_large": problem_response(431, headers, CLOSE),
        "too_late": problem_response(408, "the request was not sent in time", CLOSE),
    }
    return type("LimitedConnection", (BoundedConnection,), limits)


class BoundedConnection(HttpToolsProtocol):
    """One connection. A timer of its own checks it every few seconds, so that a request only notes its deadline."""

    most: int
    most_headers: int
    header_bytes: int
    header_seconds: float
    body_seconds: float
    too_many: Response
    too_large: Response
    too_late: Response

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline = math.inf
        self._reads_headers = False
        self._unparsed = 0
        """Bytes that arrived since the latest complete headers, piece of a body, or end of a request."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time for the first request, or refuses one connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(self.too_many)
            return
        self._deadline = self.loop.time() + self.header_seconds
        self._check_later(self.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data; refuses headers, and trailers of a body, that are too large before they are complete."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self.header_bytes and not self.transport.is_closing():
            self._refuse(self.too_large)

    def on_message_begin(self) -> None:
        """Starts the time for the headers."""
        super().on_message_begin()
        self._deadline = self.loop.time() + self.header_seconds
        self._reads_headers = True

    def on_headers_complete(self) -> None:
        """Starts the time for the body, or refuses headers that are too large or too many."""
        self._reads_headers = False
        self._deadline += self.body_seconds
        is_large = self._unparsed > self.header_bytes and self._size() > self.header_bytes
        self._unparsed = 0
        if len(self.headers) <= self.most_headers and not is_large:
            super().on_headers_complete()
            return
        application, self.app = self.app, self.too_large  # type: ignore[assignment]
        super().on_headers_complete()
        self.app = application

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the time for the request."""
        self._deadline = math.inf
        self._unparsed = 0
        super().on_message_complete()

    def _size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _check_later(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._check)

    def _check(self) -> None:
        if self.transport.is_closing():
            return
        left = self._deadline - self.loop.time()
        if left > 0:
            self._check_later(min(left, self.header_seconds))
        else:
            self._refuse(self.too_late)

    def _refuse(self, answer: Response) -> None:
        """Closes the connection, after an answer unless another one has begun."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete if self._reads_headers else not cycle.response_started):
            status = HTTPStatus(answer.status_code)
            lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
            lines += [b"%s: %s" % header for header in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
