"""A container's limits count, not the node's cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noetl_dagster import machine
from noetl_dagster.machine import cores, driver_memory, memory_limit, processes

GIBIBYTE = 1024**3


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups, and of the file that names those of the process; neither exists."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")
    return tmp_path


def write(root: Path, files: dict[str, str], own: str = "0::/\n") -> None:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)


def test_a_pod_with_limits(root: Path) -> None:
    limited = {"cpu.max": "250000 100000\n", "memory.max": f"{4 * GIBIBYTE}\n"}
    write(root, limited)
    assert cores() == 2
    assert memory_limit() == 4 * GIBIBYTE
    assert processes() == 2
    assert driver_memory() == "2g"


def test_the_groups_around_the_own_one_count_too(root: Path) -> None:
    files = {
        "pods/cpu.max": "300000 100000",
        "pods/memory.max": str(GIBIBYTE),
        "pods/one/cpu.max": "max 100000",
        "pods/one/memory.max": "max",
    }
    write(root, files, "0::/pods/one\n")
    assert cores() == 3
    assert memory_limit() == GIBIBYTE
    assert driver_memory() == "512m"


def test_little_memory_means_few_processes(root: Path) -> None:
    write(root, {"memory.max": str(3 * GIBIBYTE // 2)})
    assert cores() == 8
    assert processes() == 3
    assert driver_memory() == "768m"


def test_less_than_a_core_is_one(root: Path) -> None:
    write(root, {"cpu.max": "20000 100000", "memory.max": str(GIBIBYTE // 8)})
    assert cores() == 1
    assert processes() == 1
    assert driver_memory() == "512m"


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_the_first_version_of_control_groups(folder: str, root: Path) -> None:
    files = {
        f"{folder}/pod/cpu.cfs_quota_us": "400000",
        f"{folder}/pod/cpu.cfs_period_us": "100000",
        f"{folder}/cpu.cfs_quota_us": "-1",
        f"{folder}/cpu.cfs_period_us": "100000",
        "memory/pod/memory.limit_in_bytes": str(8 * GIBIBYTE),
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    write(root, files, "4:memory:/pod\n3:cpu,cpuacct:/pod\n1:name=systemd:/pod\n")
    assert cores() == 4
    assert memory_limit() == 8 * GIBIBYTE


@pytest.mark.parametrize("files", [{}, {"cpu.max": "max 100000", "memory.max": "max"}, {"cpu.max": "?"}])
def test_without_limits_the_machine_counts(files: dict[str, str], root: Path) -> None:
    write(root, files)
    assert cores() == 8
    assert memory_limit() is None
    assert processes() == 8
    assert driver_memory() == "2g"


def test_a_system_without_control_groups() -> None:
    assert cores() == 8
    assert memory_limit() is None
