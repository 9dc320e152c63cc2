"""A collector of traces in the tests' own process: takes OTLP over HTTP, keeps the spans."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.waiting import until


@dataclass(frozen=True)
class Told:
    """A span as it arrived; ids in hex, times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str | None
    links: tuple[tuple[str, str], ...]


@dataclass
class Collector:
    """What arrived at ``url``."""

    url: str
    spans: list[Told] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[Told]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Told:
        [span] = self.named(name)
        return span

    def below(self, span: Told) -> list[Told]:
        return [one for one in self.spans if one.parent == span.span_id]

    async def whole(self, root: str) -> None:
        """Waits until the spans are one tree of one trace below the span called ``root``.

        The root is sent last by its process, so that others that may come later are those of other processes.
        """
        await until(lambda: self.named(root), f"a span called {root}")
        await until(lambda: not self.orphans(), f"the parents of {self.orphans()}")
        assert len({span.trace_id for span in self.spans}) == 1, self.spans
        assert [span.name for span in self.spans if not span.parent] == [root]
        twins = [key for key, count in Counter(span.span_id for span in self.spans).items() if count > 1]
        assert not twins, [span for span in self.spans if span.span_id in twins]

    def orphans(self) -> list[str]:
        known = {span.span_id for span in self.spans}
        return [span.name for span in self.spans if span.parent and span.parent not in known]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_told(span, resource) for span in scope.spans]


def _told(span: Span, resource: dict[str, Any]) -> Told:
    return Told(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        resource,
        span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            found = self.path == "/v1/traces"
            if found:
                collector.take(body)
            self.send_response(200 if found else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
