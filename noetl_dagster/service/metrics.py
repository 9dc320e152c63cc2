"""The metrics of ``/metrics``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from noetl_dagster.errors import ServiceError
from noetl_dagster.events.transport.capacity import WorkerReport
from noetl_dagster.settings import DEFAULT_POOL, METRICS_FOLDER

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a latency histogram, in seconds."""

SPANS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of durations that depend on playbooks, in seconds."""

SIZES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 10_000.0)
"""Upper bounds of batch sizes."""

MOST_STEPS = 200
"""Steps with series of their own, each about thirty lines of a scrape; later steps share a series."""

OTHERS = "other"
"""The label of steps without series of their own."""

MOST_WORKERS, MOST_POOLS = 1_000, 200
"""Workers and pools with series of their own, since every report may bring new ones."""

# no series with the creation time of each counter
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The counts of one application, in a separate registry; a scrape reads the rest.

    With ``PROMETHEUS_MULTIPROC_DIR`` a scrape of any process shows the counts of all of them, without the metrics of
    a single process (memory, processor time, garbage collection).

    Raises:
        ServiceError: the shared folder does not exist.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        shared = os.environ.get(METRICS_FOLDER)
        if shared and not Path(shared).is_dir():
            raise ServiceError(f"{METRICS_FOLDER}={shared} is no folder; create it before the first start")
        own = None if shared else self._registry
        counter, histogram = partial(Counter, registry=own), partial(Histogram, registry=own)
        of_step = ["tool_kind", "step"]
        self.events = counter("noetl_ingested_events_total", "Events taken from NATS by this process")
        self.duplicates = counter("noetl_ingest_duplicates_total", "Events that the log had already")
        self.latency = histogram(
            "noetl_ingest_latency_seconds", "From the arrival of events to their commit", buckets=BOUNDS
        )
        self.requests = counter(
            "noetl_http_requests_total", "Requests by method, route and status", ["method", "route", "status"]
        )
        self.commits = histogram("noetl_ingest_batch_size", "Events per commit", buckets=SIZES)
        self.claims = counter("noetl_claims_total", "Claimed commands", ["tool_kind"])
        self.claim_sizes = histogram("noetl_claim_batch_size", "Commands per claim", buckets=SIZES)
        self.waits = histogram("noetl_queue_seconds", "Time from queueing to claim", of_step, buckets=SPANS)
        self.runs = histogram("noetl_run_seconds", "Duration of ended commands", of_step, buckets=SPANS)
        self._steps: set[tuple[str, str]] = set()
        if shared:
            MultiProcessCollector(self._registry, shared)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    def count_ingested(self, new: int, known: int, delays: Sequence[float]) -> None:
        """Counts the events of a commit; delays are in seconds."""
        self.events.inc(new)
        self.duplicates.inc(known)
        self.commits.observe(new + known)
        for seconds in delays:
            self.latency.observe(max(seconds, 0.0))

    def count_posted(self, size: int, seconds: float) -> None:
        """Counts the events of an HTTP request, and the seconds until they were in the log."""
        self.latency.observe(seconds)
        if size:
            self.commits.observe(size)

    def count_waited(self, step: str, tool_kind: str, waits: Sequence[float]) -> None:
        """Counts claimed commands of a step, with the seconds that each was in the queue."""
        self.claims.labels(tool_kind).inc(len(waits))
        self._observe(self.waits, step, tool_kind, waits)

    def count_ran(self, step: str, tool_kind: str, seconds: Sequence[float]) -> None:
        """Counts ended commands of a step, with the seconds that each ran."""
        self._observe(self.runs, step, tool_kind, seconds)

    def _observe(self, histogram: Histogram, step: str, tool_kind: str, values: Sequence[float]) -> None:
        if (step, tool_kind) not in self._steps:
            if len(self._steps) < MOST_STEPS:
                self._steps.add((step, tool_kind))
            else:
                step = OTHERS
        series = histogram.labels(tool_kind, step)
        for value in values:
            series.observe(max(value, 0.0))

    def text(self, now: Collector) -> bytes:
        """Returns one scrape in Prometheus' text format, version 0.0.4."""
        scrape = CollectorRegistry()
        scrape.register(now)
        scrape.register(self._registry)
        return generate_latest(scrape)


class QueuedCommands(NamedTuple):
    """Commands of one pool and tool kind; ``oldest``: seconds for which the oldest queued one has waited."""

    pool: str
    tool_kind: str
    queued: int
    active: int
    oldest: float | None


@dataclass(frozen=True, slots=True, eq=False)  # a registry asks for its hash
class CurrentMetrics(Collector):
    """Metrics that a scrape reads from the database, from NATS and from the workers' reports.

    Attributes:
        lag: worker events in NATS; None if NATS does not answer.
        projection_lag: age in seconds of the oldest event that ``noetl.execution`` does not have.
    """

    queue: Sequence[QueuedCommands]
    dead_letters: int
    lag: int | None
    workers: Sequence[WorkerReport]
    projection_lag: float = 0.0

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics; the default pool has series even if nothing uses it."""
        depth = _gauge("noetl_queue_depth", "Commands that wait for a worker", "pool")
        active = _gauge("noetl_queue_active", "Commands that workers have claimed", "pool")
        oldest = _gauge("noetl_queue_oldest_seconds", "Age of the command that has waited longest", "pool")
        waiting = _gauge("noetl_queue_waiting", "Commands that wait for a worker", "pool", "tool_kind")
        workers = _gauge("noetl_workers", "Workers that report", "pool")
        reporting = sorted(self.workers, key=lambda one: (one.pool, one.worker_id))
        named = sorted({one.pool for one in reporting})[:MOST_POOLS]  # workers choose their names
        used = {one.pool for one in self.queue} | set(named)
        for pool in sorted({DEFAULT_POOL, *used}):
            queued = [one for one in self.queue if one.pool == pool]
            depth.add_metric([pool], sum(one.queued for one in queued))
            active.add_metric([pool], sum(one.active for one in queued))
            oldest.add_metric([pool], max((one.oldest or 0.0 for one in queued), default=0.0))
            for one in queued:
                waiting.add_metric([pool, one.tool_kind], one.queued)
            workers.add_metric([pool], sum(one.pool == pool for one in self.workers))
        slots = _gauge("noetl_worker_slots", "Commands that a worker may run at once", "pool", "worker_id")
        tasks = _gauge("noetl_worker_active_tasks", "Commands that a worker runs now", "pool", "worker_id")
        use = _gauge("noetl_worker_utilisation", "Share of a worker's slots in use", "pool", "worker_id")
        for worker in reporting[:MOST_WORKERS]:
            labels = [worker.pool, worker.worker_id]
            slots.add_metric(labels, worker.slots)
            tasks.add_metric(labels, worker.active_tasks)
            use.add_metric(labels, worker.active_tasks / worker.slots if worker.slots else 0.0)
        yield from (depth, active, oldest, waiting, workers, slots, tasks, use)
        for name, meaning, value in (
            ("noetl_dead_letters", "Messages in noetl.dead_letter", self.dead_letters),
            ("noetl_ingest_lag_messages", "Worker events in NATS that are not in the log yet", self.lag),
            (
                "noetl_projection_lag_seconds",
                "Age of the oldest event that is not projected",
                self.projection_lag,
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, meaning, value=value)


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=labels)
