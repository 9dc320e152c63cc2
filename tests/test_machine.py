"""A container's limits count, not the node's cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noetl_dagster.machine import cores, driver_memory, memory_limit, processes

GIBIBYTE = 1024**3


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def written(root: Path, files: dict[str, str], own: str = "0::/\n") -> tuple[Path, Path]:
    """Files of control groups, and the one that names those of the process."""
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)
    return root / "cgroup", root / "own"


def test_a_pod_with_limits(tmp_path: Path) -> None:
    limited = {"cpu.max": "250000 100000\n", "memory.max": f"{4 * GIBIBYTE}\n"}
    where = written(tmp_path, limited)
    assert cores(*where) == 2
    assert memory_limit(*where) == 4 * GIBIBYTE
    assert processes(*where) == 2
    assert driver_memory(*where) == "2g"


def test_the_groups_around_the_own_one_count_too(tmp_path: Path) -> None:
    files = {
        "pods/cpu.max": "300000 100000",
        "pods/memory.max": str(GIBIBYTE),
        "pods/one/cpu.max": "max 100000",
        "pods/one/memory.max": "max",
    }
    where = written(tmp_path, files, "0::/pods/one\n")
    assert cores(*where) == 3
    assert memory_limit(*where) == GIBIBYTE
    assert driver_memory(*where) == "512m"


def test_little_memory_means_few_processes(tmp_path: Path) -> None:
    where = written(tmp_path, {"memory.max": str(3 * GIBIBYTE // 2)})
    assert cores(*where) == 8
    assert processes(*where) == 3
    assert driver_memory(*where) == "768m"


def test_less_than_a_core_is_one(tmp_path: Path) -> None:
    where = written(tmp_path, {"cpu.max": "20000 100000", "memory.max": str(GIBIBYTE // 8)})
    assert cores(*where) == 1
    assert processes(*where) == 1
    assert driver_memory(*where) == "512m"


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_the_first_version_of_control_groups(folder: str, tmp_path: Path) -> None:
    files = {
        f"{folder}/pod/cpu.cfs_quota_us": "400000",
        f"{folder}/pod/cpu.cfs_period_us": "100000",
        f"{folder}/cpu.cfs_quota_us": "-1",
        f"{folder}/cpu.cfs_period_us": "100000",
        "memory/pod/memory.limit_in_bytes": str(8 * GIBIBYTE),
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    where = written(tmp_path, files, "4:memory:/pod\n3:cpu,cpuacct:/pod\n1:name=systemd:/pod\n")
    assert cores(*where) == 4
    assert memory_limit(*where) == 8 * GIBIBYTE


@pytest.mark.parametrize("files", [{}, {"cpu.max": "max 100000", "memory.max": "max"}, {"cpu.max": "?"}])
def test_without_limits_the_machine_counts(files: dict[str, str], tmp_path: Path) -> None:
    where = written(tmp_path, files)
    assert cores(*where) == 8
    assert memory_limit(*where) is None
    assert processes(*where) == 8
    assert driver_memory(*where) == "2g"


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cores(tmp_path / "none", tmp_path / "nobody") == 8
    assert memory_limit(tmp_path / "none", tmp_path / "nobody") is None
