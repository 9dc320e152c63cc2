"""What a peer's program is told and what it prints. Stands on nothing: it is imported in every peer's own venv."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

WARM_ITEMS = 20
"""Each program has run so many items before it measures."""

RUNS = 3


@dataclass(frozen=True)
class Task:
    items: int
    folder: Path
    """For whatever the peer keeps; empty at first, deleted afterwards."""
    database: str
    """URL of an empty PostgreSQL database; empty: the peer's own storage."""
    mode: str


def task() -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--database", default="")
    parser.add_argument("--mode", default="")
    return Task(**vars(parser.parse_args()))


class Watch:
    """Measures the same a few times; what counts is the middle."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - started)

    def report(self, package: str, items: int, note: str) -> None:
        """Prints what was measured as the last line of standard output."""
        line = {
            "peer": package,
            "version": version(package),
            "items": items,
            "seconds": statistics.median(self.seconds),
            "runs": self.seconds,
            "note": note,
        }
        print("\n" + json.dumps(line), flush=True)


def check(results: Sequence[int], items: int) -> None:
    """Whatever the peer gathered has to be every item, doubled."""
    if list(results) != [n * 2 for n in range(items)]:
        raise SystemExit("it gathered something else than every item, doubled")
