"""Who is called, asked or told hears of the trace: ``traceparent`` over HTTP and NATS, ids in logs and runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from dagster import DagsterInstance, DagsterRun
from nats.aio.msg import Msg

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.events.transport.nats import NatsNames, connect
from noetl_dagster.launcher.address import LAUNCHER_TAG, Address, execute_request
from noetl_dagster.process import logs
from noetl_dagster.process.spans import trace_id_of
from noetl_dagster.settings import EventTransport, LogFormat, Settings
from tests.playbooks import playbook, text_of
from tests.pool import working
from tests.process.tracing.collector import Collector
from tests.service.conftest import serving
from tests.waiting import until


@contextmanager
def hearing() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """An address, and the headers of the requests to it."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", heard
    finally:
        server.shutdown()
        server.server_close()


OWN = f"00-{'1' * 32}-{'2' * 16}-00"


async def test_a_called_api_hears_of_the_call_unless_the_playbook_says_otherwise(
    engine: Engine, collector: Collector
) -> None:
    with hearing() as (url, heard):
        body = f"""
        workflow:
          - step: start
            tool: {{kind: http, url: "{url}/one"}}
            next: [own]
          - step: own
            tool: {{kind: http, url: "{url}/two", headers: {{Traceparent: "{OWN}"}}}}
        """
        state = await engine.run(playbook(body))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    await collector.whole("sample")
    call = collector.one("start.http")
    assert [headers["traceparent"] for headers in heard] == [f"00-{call.trace_id}-{call.span_id}-01", OWN]
    assert call.attributes["http.request.method"] == "GET"
    assert call.attributes["http.response.status_code"] == 200
    assert call.attributes["url.full"] == f"{url}/one"


POOLED = """
workflow:
  - step: start
    spec: {dispatch: workers}
    tool: {kind: python, code: "result = 1"}
"""


@pytest.mark.parametrize("transport", [EventTransport.NATS, EventTransport.HTTP])
async def test_events_of_workers_carry_the_trace(
    settings: Settings, collector: Collector, transport: EventTransport
) -> None:
    posted: list[str | None] = []

    def listening(app: Any) -> Any:
        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] == "/api/events/batch":
                posted.append(dict(scope["headers"]).get(b"traceparent", b"").decode())
            await app(scope, receive, send)

        return asgi

    published: list[str | None] = []

    async def heard(message: Msg) -> None:
        published.append((message.headers or {}).get("traceparent"))

    async with serving(settings, listening, event_transport=transport) as service:
        client = await connect(service.settings, "a listener")
        await client.subscribe(f"{NatsNames(settings).event_prefix}.>", cb=heard)
        await client.flush()
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w1"):
            state = await engine.run(playbook(POOLED))
        await engine.close()
        assert state.status is ExecutionStatus.COMPLETED, state.error
        carried = published if transport is EventTransport.NATS else posted
        await until(lambda: carried)
        await client.close()
    await collector.whole("sample")
    command = collector.one("start command")
    assert set(carried) == {f"00-{command.trace_id}-{command.span_id}-01"}


async def test_who_asks_over_http_is_linked(settings: Settings, collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "asked.yaml").write_text(text_of("asked", POOLED.replace("workers", "inline")))
    async with serving(settings, playbooks_path=tmp_path) as service:
        answer = await service.client.post(
            "/api/executions/execute", json={"path": "tests/asked"}, headers={"traceparent": OWN}
        )
        assert answer.status_code == 202, answer.text
        assert isinstance(answer, httpx.Response)
        await collector.whole("asked")
    root = collector.one("asked")
    assert root.trace_id == f"{trace_id_of(int(answer.json()['execution_id'])):032x}"
    assert root.links == (("1" * 32, "2" * 16),)


FANOUT = """
workflow:
  - step: start
    loop: {in: "{{ range(6) }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 2}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [end]
  - step: end
    tool: {kind: python, code: "result = 1"}
"""


def assert_is_of_run(run: DagsterRun | None, collector: Collector) -> None:
    """The ops of a run wrote one tree, and each names the other."""
    asyncio.run(collector.whole("sample"))
    root = collector.one("sample")
    assert run is not None
    assert run.tags["noetl/trace_id"] == root.trace_id
    assert {span.name for span in collector.below(root)} == {"start", "end"}
    assert len(collector.below(collector.one("start"))) == 6
    for name in ("sample", "start", "end"):
        assert collector.one(name).attributes["dagster.run_id"] == run.run_id


def test_a_driver_that_was_forked_sends_too(settings: Settings, collector: Collector, tmp_path: Path) -> None:
    """The run server forks the drivers of warm runs, which live on after their run."""
    (tmp_path / "sample.yaml").write_text(text_of("sample", FANOUT))
    home = str(embedded.dagster_home(settings))
    environment = {**os.environ, "DAGSTER_HOME": home, **embedded.environment(settings)}
    address = Address.of(embedded.run_server_folder(settings), environment, 1)
    with closing(address.open()) as server:
        server.send(execute_request(str(tmp_path / "sample.yaml"), 1, {}, lenient=False))
        assert "accepted" in (server.receive() or {})
        assert server.receive() == {"ended": "1", "error": None}
    with DagsterInstance.from_config(home) as instance:
        [run] = instance.get_runs()
        assert LAUNCHER_TAG in run.tags
        assert_is_of_run(run, collector)


async def test_log_lines_say_where_they_belong(
    engine: Engine, settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    formatter: Callable[[], logging.Formatter] = logs._json_formatter
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Keeping()
    handler.setFormatter(formatter())
    logger = logging.getLogger("noetl_dagster")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    try:
        await engine.run(
            playbook("""
        workflow:
          - step: start
            tool: {kind: python, code: "print('at work')"}
        """)
        )
    finally:
        logger.removeHandler(handler)
    await collector.whole("sample")
    [line] = [json.loads(line) for line in lines if "at work" in line]
    call = collector.one("start.python")
    assert (line["trace_id"], line["span_id"]) == (call.trace_id, call.span_id)
    assert settings.log_format is LogFormat.TEXT
