"""The run server starts drivers beyond one for each core only while they help."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from noetl_dagster.launcher import server
from noetl_dagster.launcher.address import Address


@pytest.mark.parametrize(
    ("idle_seconds", "ends", "useful"),
    [
        pytest.param(1.0, True, [False, True, True, True], id="cores are idle"),
        pytest.param(0.0, True, [False, False, False, False], id="cores are busy and runs end"),
        pytest.param(0.0, False, [False, False, True, False], id="cores are busy and no run ends"),
    ],
)
def test_another_driver_starts_if_cores_are_idle_or_no_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_seconds: float, ends: bool, useful: list[bool]
) -> None:
    now, idle = 100.0, 0.0
    monkeypatch.setattr(server.machine, "cores", lambda: 2)
    monkeypatch.setattr(server.psutil, "cpu_times", lambda: SimpleNamespace(idle=idle))
    monkeypatch.setattr(server.time, "monotonic", lambda: now)
    asked = server.RunServer(Address(tmp_path, "key", {}, 8))
    found = []
    for _ in range(4):
        found.append(asked._is_another_useful())
        if ends:
            asked._latest_end = now
        now, idle = now + 0.6, idle + idle_seconds
    assert found == useful
    now -= 0.5  # less than the time of a measurement
    asked._measured = now - 0.1, -10.0
    assert not asked._is_another_useful()
