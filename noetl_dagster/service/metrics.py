"""Counters and histograms in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a latency histogram, in seconds."""


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.total += seconds
        place = next((at for at, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))
        self.counts[place] += 1


@dataclass(slots=True)
class Metrics:
    """What the service counts itself; the rest is asked for when ``/metrics`` is."""

    ingest: Histogram = field(default_factory=Histogram)
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)


Labels = Mapping[str, str]


class Exposition:
    """Builds the text of one scrape."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(
        self, name: str, kind: str, meaning: str, samples: Iterable[tuple[Labels, float]] | float
    ) -> None:
        """One metric family; a number alone is a sample without labels."""
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        given = [({}, samples)] if isinstance(samples, int | float) else samples
        self._lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in given]

    def histogram(self, name: str, meaning: str, histogram: Histogram) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"]
        running = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram.counts, strict=True):
            running += count
            self._lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
        self._lines += [f"{name}_sum {histogram.total:.6f}", f"{name}_count {running}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
