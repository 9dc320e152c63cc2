"""Which executions are traced, where to, and what becomes of a collector that is away."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time

import pytest
from pydantic import ValidationError

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.process import tracing
from noetl_dagster.process.spans import SpanRef, is_sampled, trace_id_of
from noetl_dagster.settings import Settings
from noetl_dagster.worker.spans import trace_of
from tests.playbooks import playbook, text_of
from tests.process.tracing.collector import Collector, collecting
from tests.waiting import PATIENCE_SECONDS

BODY = """
workflow:
  - step: start
    tool: {kind: python, code: "result = 1"}
"""

NOWHERE = "http://127.0.0.1:1"


def with_tracing(words: str) -> str:
    return text_of("sample", f"tracing: {words}\n" + BODY)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 400), (0.5, 200)])
def test_executions_are_chosen_by_their_ids(share: float, expected: int) -> None:
    own = Settings(tracing_endpoint=NOWHERE, tracing_sampling=share)
    ids = range(7_000_000_000, 7_000_000_400)
    chosen = [n for n in ids if trace_of(own, playbook(BODY), ExecutionState(n)) is not None]
    assert chosen == [n for n in ids if is_sampled(trace_id_of(n), share)], "anybody else decides alike"
    assert abs(len(chosen) - expected) <= (60 if 0 < share < 1 else 0)


def test_a_child_goes_with_its_parent() -> None:
    parent = SpanRef(5, 6).traceparent
    traced = ExecutionState(1, parent_execution_id=2, trace={"parent": parent})
    none = Settings(tracing_endpoint=NOWHERE, tracing_sampling=0.0)
    found = trace_of(none, playbook(BODY), traced)
    assert found is not None
    assert (found.trace_id, found.parent) == (5, 6)
    assert (
        trace_of(Settings(tracing_endpoint=NOWHERE), playbook(BODY), ExecutionState(1, parent_execution_id=2)) is None
    )


async def test_a_playbook_has_the_last_word(settings: Settings, collector: Collector) -> None:
    engine = await Engine.open(settings)
    with collecting() as other:
        named = f"{{endpoint: '{other.url}', service_name: billing, sampling: 1}}"
        for words in ("{enabled: false}", "false", "{sampling: 0}", named):
            await engine.run(parse_playbook(with_tracing(words), file="sample.yaml"))
        await other.whole("sample")
        assert other.one("sample").resource["service.name"] == "billing"
    await engine.close()
    assert collector.spans == []


async def test_headers_of_the_environment_go_to_our_own_collector_only(
    settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=s3cret")
    engine = await Engine.open(settings)
    with collecting() as other:
        await engine.run(playbook(BODY))
        await engine.run(parse_playbook(with_tracing(f"{{endpoint: '{other.url}'}}"), file="sample.yaml"))
        await collector.whole("sample")
        await other.whole("sample")
    await engine.close()
    assert {headers.get("x-api-key") for headers in collector.headers} == {"s3cret"}
    assert {headers.get("x-api-key") for headers in other.headers} == {None}


async def test_a_collector_that_is_away_is_said_once_and_waited_for_in_vain(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as gone:
        url = gone.url
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    engine = await Engine.open(settings.model_copy(update={"tracing_endpoint": url}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await engine.run(playbook(BODY))).status is ExecutionStatus.COMPLETED
            await asyncio.to_thread(tracing.flush)
    begun = time.monotonic()
    await engine.close()
    assert time.monotonic() - begun < PATIENCE_SECONDS
    said = [record.getMessage() for record in caplog.records if "traces" in record.getMessage()]
    assert len(said) == 1
    assert url in said[0]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


WITHOUT = """
import asyncio, sys, threading
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import load_settings

async def main():
    engine = await Engine.open(load_settings(sys.stdin.readline()))
    state = await engine.run(parse_playbook(sys.stdin.read(), file="sample.yaml"))
    print(state.status)
    await engine.close()
    print([name for name in sys.modules if name.startswith("opentelemetry") and sys.modules[name]])
    print([thread.name for thread in threading.enumerate() if "Otel" in thread.name])

asyncio.run(main())
"""


def run_apart(settings: Settings) -> subprocess.CompletedProcess[str]:
    from noetl_dagster.settings import dump_settings

    given = dump_settings(settings) + "\n" + text_of("sample", BODY)
    return subprocess.run([sys.executable, "-c", WITHOUT], input=given, capture_output=True, text=True, check=True)


def test_a_missing_package_is_said_once(settings: Settings) -> None:
    ended = run_apart(settings)
    assert ended.stdout.startswith("COMPLETED")
    assert ended.stderr.count("noetl-dagster[tracing]") == 1, ended.stderr


def test_off_is_off(settings: Settings) -> None:
    ended = run_apart(settings.model_copy(update={"tracing_endpoint": None}))
    assert ended.stdout.splitlines() == ["COMPLETED", "[]", "[]"]
    assert ended.stderr == ""


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="http://host:4318"):
        Settings(tracing_endpoint="jaeger:6831")


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", True),
        (f"cc-{'a' * 32}-{'b' * 16}-01-more", True),
        (f"00-{'a' * 32}-{'b' * 16}-01-more", False),
        (f"ff-{'a' * 32}-{'b' * 16}-01", False),
        (f"00-{'0' * 32}-{'b' * 16}-01", False),
        (f"00-{'a' * 32}-{'0' * 16}-01", False),
        (f"00-{'A' * 32}-{'b' * 16}-01", False),
        ("nonsense", False),
    ],
)
def test_headers_of_others(header: str, valid: bool) -> None:
    assert (SpanRef.parse(header) is not None) is valid
