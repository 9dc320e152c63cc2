"""``/metrics`` shows what goes on, not only zeros."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.transport.capacity import WorkerReport
from noetl_dagster.events.transport.nats_transport import NatsTransport
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.service.metrics import BOUNDS, MOST_STEPS, OTHERS, CurrentMetrics, Metrics, QueuedCommands
from tests.events.transport.conftest import IDS, ended, hold
from tests.service.conftest import Service, samples
from tests.service.test_api import claim_of, queue, running_execution
from tests.waiting import until


async def shown(service: Service) -> dict[str, float]:
    """Values of the scrape by name and labels."""
    lines = (await service.client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def test_the_queue_and_its_claims(service: Service) -> None:
    execution_id = await running_execution(service)
    first, _ = [await queue(service, execution_id, index) for index in range(2)]
    for _ in range(2):
        assert (await service.client.post("/api/commands/claim", json=claim_of(first))).is_success
    found = await shown(service)
    assert (found['noetl_queue_depth{pool="default"}'], found['noetl_queue_active{pool="default"}']) == (1, 1)
    assert found['noetl_queue_waiting{pool="default",tool_kind="noop"}'] == 1
    assert found['noetl_queue_oldest_seconds{pool="default"}'] > 0
    assert found['noetl_claim_batch_size_bucket{le="0.0"}'] == 1
    assert found['noetl_claim_batch_size_bucket{le="1.0"}'] == found["noetl_claim_batch_size_count"] == 2
    many = {"worker_id": "w1", "event_ids": [str(IDS.next()) for _ in range(5)]}
    assert (await service.client.post("/api/commands/claim", json=many)).is_success  # one is left
    found = await shown(service)
    assert (found["noetl_claim_batch_size_count"], found["noetl_claim_batch_size_sum"]) == (3, 2)
    assert found['noetl_claims_total{tool_kind="noop"}'] == 2
    assert found['noetl_queue_seconds_count{step="step",tool_kind="noop"}'] == 2
    assert (
        found['noetl_queue_oldest_seconds{pool="default"}']
        == found['noetl_queue_waiting{pool="default",tool_kind="noop"}']
        == 0
    )


@pytest.mark.parametrize("count", [3, 150])
async def test_how_long_commands_ran(service: Service, count: int) -> None:
    """Few events go into the log in another way than many."""
    execution_id = await running_execution(service)
    ends = [await queue(service, execution_id, index, held=True) for index in range(count)]
    ends[0].duration = None
    unqueued = ended(execution_id, count)
    messages = [message_of(event) for event in [*ends, unqueued]]
    for _ in range(2):  # the second time nothing is new
        await service.client.post("/api/events/batch", json={"events": messages})
    found = await shown(service)
    assert found['noetl_run_seconds_count{step="step",tool_kind="noop"}'] == count - 1
    assert found['noetl_run_seconds_sum{step="step",tool_kind="noop"}'] == 0.25 * (count - 1)
    assert [name for name in found if name.startswith("noetl_run_seconds_count")] == [
        'noetl_run_seconds_count{step="step",tool_kind="noop"}'
    ]
    assert (found["noetl_ingest_batch_size_count"], found["noetl_ingest_batch_size_sum"]) == (
        2,
        2 * count + 2,
    )


async def test_the_way_from_nats_into_the_log(service: Service) -> None:
    execution_id = await running_execution(service)
    await hold(service.plane.engine.runtime.pool, execution_id, 30)
    transport = NatsTransport(service.plane.client)
    events = [ended(execution_id, index) for index in range(30)]
    await transport.publish(events)
    await transport.publish(events[:2])  # in another message
    await transport.publish([ended(IDS.next(), 0)])  # its execution may yet come: it waits in the stream

    async def taken() -> dict[str, float] | None:
        found = await shown(service)
        settled = found["noetl_ingest_duplicates_total"] == 2 and found["noetl_ingest_lag_messages"] == 1
        return found if settled else None

    found = await until(taken, "all events but the one that waits")
    assert found["noetl_ingested_events_total"] == 30
    assert found["noetl_ingest_latency_seconds_count"] == 32
    assert found["noetl_ingest_latency_seconds_sum"] > 0
    assert found["noetl_ingest_batch_size_sum"] == 32
    assert found["noetl_dead_letters"] == 0


QUIET = CurrentMetrics(
    queue=[QueuedCommands("default", "noop", 0, 0, 0.0)],
    dead_letters=0,
    lag=0,
    workers=[WorkerReport(worker_id="w", slots=4)],
)


def test_buckets_and_counters() -> None:
    counted = Metrics()
    counted.count_ingested(2, 1, [0.003, 0.003, 7.0])
    counted.requests.labels("GET", "/health", 200).inc()
    text = counted.text(QUIET).decode()
    found = samples(text)
    buckets = {labels[0][1]: value for name, *labels in found if name == "noetl_ingest_latency_seconds_bucket"
               for value in [found[name, *labels]]}  # fmt: skip
    assert list(buckets) == [*map(str, BOUNDS), "+Inf"]
    assert (buckets["0.0025"], buckets["0.005"], buckets["5.0"], buckets["10.0"]) == (0, 2, 2, 3)
    assert found["noetl_ingested_events_total",] == 2
    assert found["noetl_ingest_duplicates_total",] == 1
    assert not any(name.endswith("_created") for name, *_ in found)


def test_claims_and_waits() -> None:
    counted = Metrics()
    counted.claim_sizes.observe(3)
    counted.count_waited("fetch", "http", [0.003, -0.1])  # a clock was set back
    counted.count_waited("load", "postgres", [7.0])
    counted.count_waited("fetch", "http", [])
    counted.claim_sizes.observe(0)
    found = samples(counted.text(QUIET).decode())
    assert found["noetl_claims_total", ("tool_kind", "http")] == 2
    assert found["noetl_claims_total", ("tool_kind", "postgres")] == 1
    assert (found["noetl_claim_batch_size_count",], found["noetl_claim_batch_size_sum",]) == (2, 3)
    fetch, load = (("step", "fetch"), ("tool_kind", "http")), (("step", "load"), ("tool_kind", "postgres"))
    assert (found["noetl_queue_seconds_count", *fetch], found["noetl_queue_seconds_sum", *fetch]) == (
        2,
        0.003,
    )
    assert (found["noetl_queue_seconds_count", *load], found["noetl_queue_seconds_sum", *load]) == (1, 7.0)


def test_only_so_many_steps_have_series_of_their_own() -> None:
    counted = Metrics()
    for number in range(MOST_STEPS + 50):
        counted.count_waited(f"step{number}", "noop", [0.1])
        counted.count_ran(f"step{number}", "noop", [0.2])
    counted.count_ran("step0", "noop", [0.2])
    found = samples(counted.text(QUIET).decode())
    for name in ("noetl_queue_seconds_count", "noetl_run_seconds_count"):
        assert sum(series[0] == name for series in found) == MOST_STEPS + 1
        assert found[name, ("step", OTHERS), ("tool_kind", "noop")] == 50
    assert found["noetl_run_seconds_count", ("step", "step0"), ("tool_kind", "noop")] == 2


async def test_the_process_is_measured_too(service: Service) -> None:
    found = await shown(service)
    assert found["process_resident_memory_bytes"] > 10e6
    assert found["process_cpu_seconds_total"] > 0
    assert found["process_open_fds"] > 0
    assert found['python_gc_collections_total{generation="0"}'] > 0


def test_applications_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.count_ingested(3, 0, [])
    assert samples(first.text(QUIET).decode())["noetl_ingested_events_total",] == 3
    assert samples(second.text(QUIET).decode())["noetl_ingested_events_total",] == 0


COUNT = """
import os
from noetl_dagster.service.metrics import CurrentMetrics, Metrics
children = [0]
while len(children) < 3 and (child := os.fork()):
    children.append(child)
    os.waitpid(child, 0)
counted = Metrics()
counted.count_ingested(2, 1, [0.01, 0.02])
counted.requests.labels("GET", "/health", 200).inc()
if len(children) == 3:
    print(counted.text(CurrentMetrics(queue=[], dead_letters=4, lag=0, workers=[])).decode())
"""
"""Three processes count, and the last one shows all."""


def test_processes_with_a_shared_folder_show_what_all_count(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True)
    found = samples(done.stdout)
    assert found["noetl_ingested_events_total",] == 6
    assert found["noetl_ingest_latency_seconds_count",] == 6
    assert found["noetl_http_requests_total", ("method", "GET"), ("route", "/health"), ("status", "200")] == 3
    assert found["noetl_dead_letters",] == 4
    assert not any(name.startswith("process_") for name, *_ in found)


def test_a_shared_folder_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ServiceError, match=r"PROMETHEUS_MULTIPROC_DIR=.*nowhere is no folder"):
        Metrics()


async def test_requests_are_counted_under_few_names(service: Service) -> None:
    await service.client.request("PROPFIND", "/health")
    await service.client.post("/api/executions/x/cancel", json={})
    await service.client.get("/health", headers={"host": "evil.example"})
    await service.client.get("/nowhere")
    text = (await service.client.get("/metrics")).text
    shown = {line.partition("{")[2] for line in text.splitlines() if line.startswith("noetl_http_requests")}
    assert shown == {
        'method="other",route="/health",status="405"} 1.0',
        'method="POST",route="/api/executions/{execution_id}/cancel",status="422"} 1.0',
        'method="GET",route="none",status="400"} 1.0',
        'method="GET",route="none",status="404"} 1.0',
    }
