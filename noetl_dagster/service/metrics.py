"""What ``/metrics`` shows, kept and written by ``prometheus_client``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from noetl_dagster.transport.capacity import WorkerReport

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The library's own variable: a folder in which processes keep one account of what each of them counts."""

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a latency histogram, in seconds."""

# no series with its time of birth beside every counter, which nobody asked for
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """What one application counts itself, in a registry of its own; the rest is asked for by a scrape.

    With ``PROMETHEUS_MULTIPROC_DIR`` a scrape of any process shows the counts of all of them. What is known of
    one process only (memory, processor time, garbage collection) is left out then: nobody could tell whose it is.

    Raises:
        ServiceError: the shared folder does not exist.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        shared = os.environ.get(SHARED_FOLDER)
        if shared and not Path(shared).is_dir():
            raise ServiceError(
                f"{SHARED_FOLDER}={shared} is no folder; make it, empty, before the first start"
            )
        own = None if shared else self._registry
        self.events = Counter(
            "noetl_ingested_events_total", "Events taken from NATS by this process", registry=own
        )
        self.duplicates = Counter(
            "noetl_ingest_duplicates_total", "Events that the log had already", registry=own
        )
        self.latency = Histogram(
            "noetl_ingest_latency_seconds",
            "From the arrival of events to their commit",
            buckets=BOUNDS,
            registry=own,
        )
        self.requests = Counter(
            "noetl_http_requests_total",
            "Requests by method, route and status",
            ["method", "route", "status"],
            registry=own,
        )
        if shared:
            MultiProcessCollector(self._registry, shared)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    def count_ingested(self, new: int, known: int, delays: Sequence[float]) -> None:
        """Takes what a batch of worker events did; delays in seconds."""
        self.events.inc(new)
        self.duplicates.inc(known)
        for seconds in delays:
            self.latency.observe(max(seconds, 0.0))

    def text(self, now: Situation) -> bytes:
        """One scrape in Prometheus' text format, version 0.0.4."""
        scrape = CollectorRegistry()
        scrape.register(now)
        scrape.register(self._registry)
        return generate_latest(scrape)


@dataclass(frozen=True, slots=True, eq=False)  # a registry asks for its hash
class Situation(Collector):
    """How things stand at one moment, in the database, in NATS and among the workers.

    Attributes:
        lag: worker events in NATS; None while NATS does not say.
    """

    queued: int
    active: int
    dead_letters: int
    lag: int | None
    workers: Sequence[WorkerReport]

    def collect(self) -> Iterable[Metric]:
        yield _gauge("noetl_queue_depth", "Commands that wait for a worker", self.queued)
        yield _gauge("noetl_queue_active", "Commands that workers have claimed", self.active)
        yield _gauge("noetl_dead_letters", "Messages put aside in noetl.dead_letter", self.dead_letters)
        if self.lag is not None:
            yield _gauge("noetl_ingest_lag_messages", "Worker events in NATS, not in the log yet", self.lag)
        yield _gauge("noetl_workers", "Workers that report", len(self.workers))
        slots = _by_worker("noetl_worker_slots", "Commands that a worker runs at once")
        tasks = _by_worker("noetl_worker_active_tasks", "Commands that a worker runs now")
        use = _by_worker("noetl_worker_utilisation", "Share of a worker's slots in use")
        for one in self.workers:
            slots.add_metric([one.worker_id], one.slots)
            tasks.add_metric([one.worker_id], one.active_tasks)
            use.add_metric([one.worker_id], one.active_tasks / one.slots if one.slots else 0.0)
        yield from (slots, tasks, use)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)


def _by_worker(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=["worker_id"])
