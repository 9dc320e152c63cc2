"""What a process costs from its start: seconds until it is done or ready, and of the processor."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process: seconds until it was done, and seconds of processor time."""

    wall: float
    cpu: float

    def least(self, other: Cost) -> Cost:
        return Cost(min(self.wall, other.wall), min(self.cpu, other.cpu))


def ended(arguments: list[str], environment: dict[str, str], folder: Path) -> Cost:
    """Of ``python <arguments>``, to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output(arguments, environment, folder)
    return _since(before, began)


def until_line(arguments: list[str], text: str, environment: dict[str, str], folder: Path) -> Cost:
    """Until a service says that it is ready; its processor time includes its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, f"{arguments} ended before it was ready"
    wall = time.perf_counter() - began
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return Cost(wall, _since(before, began).cpu)


def output(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    """What ``python <arguments>`` prints."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout


def _since(before: resource.struct_rusage, began: float) -> Cost:
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - began, cpu)
