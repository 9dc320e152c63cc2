"""Limits of this process: those of its control groups (versions 1 and 2) rather than of the whole machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""Names the control groups of this process."""

PROCESS_BYTES = 512 * 1024**2
"""Estimated memory of one process that works on a loop."""

DRIVER_BYTES = 2 * 1024**3
"""Memory of Spark's driver if there is no limit."""

LEAST_DRIVER_BYTES = 512 * 1024**2
"""Spark does not start a driver with less memory."""

_UNLIMITED = 2**60
"""Version 1 writes a number near 2**63 if there is no limit."""


def cores() -> int:
    """Returns the number of cores that this process may use: its CPU affinity or its quota, whichever is less."""
    quotas = [int(quota) for folder in _folders("cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def memory_limit() -> int | None:
    """Returns the bytes that this process and its children may use together; None if there is no limit."""
    limits = [
        limit
        for folder in _folders("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / name)) is not None and limit < _UNLIMITED
    ]
    return min(limits, default=None)


def processes() -> int:
    """Returns the number of processes that may work in parallel: one per core, as far as the memory suffices."""
    limit, most = memory_limit(), cores()
    return most if limit is None else max(1, min(most, limit // PROCESS_BYTES))


def driver_memory() -> str:
    """Returns the memory of a Spark driver in Spark's notation: half of the limit, or ``2g`` without a limit.

    The other half is for the JVM outside its heap, Spark's Python workers and this process.
    """
    limit = memory_limit()
    wanted = DRIVER_BYTES if limit is None else max(LEAST_DRIVER_BYTES, limit // 2)
    mebibytes = wanted // 1024**2
    return f"{mebibytes}m" if mebibytes % 1024 else f"{mebibytes // 1024}g"


def _folders(controller: str) -> Iterator[Path]:
    """Yields the control groups of this process, from its own up to the root."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = CGROUPS
        if controllers:  # version 1
            base = CGROUPS / (controllers if (CGROUPS / controllers).is_dir() else controller)
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            yield folder
            folder = folder.parent
    yield CGROUPS


def _quota(folder: Path) -> float | None:
    """Returns the cores that a group may use; None without a quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # version 1
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    """Returns the number in a file; None for ``max`` or if there is no file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
