"""The soak test judges series by their second half; a short run of it loses nothing."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.soak.executions import Outcome
from benchmarks.soak.report import failed, report
from benchmarks.soak.run import Plan, Result
from benchmarks.soak.sampling import Recorder
from benchmarks.soak.series import Series, Tolerance, Verdict
from tests.waiting import PROCESS_SECONDS

_RANDOM = random.Random(7)
NOISE = [_RANDOM.uniform(-10, 10) for _ in range(360)]
TOLERANCE = Tolerance(0.1, 5)


def series(value: Callable[[int], float], *, count: int = 360, tolerance: Tolerance | None = TOLERANCE) -> Series:
    found = Series("s", "MB", tolerance)
    for number in range(count):
        found.add(10.0 * number, value(number))
    return found


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (series(lambda n: 100.0), Verdict.FLAT),
        (series(lambda n: 100 + NOISE[n]), Verdict.FLAT),
        (series(lambda n: min(n, 150)), Verdict.FLAT),  # a cache that fills up in the first half
        (series(lambda n: 100 + n % 40), Verdict.FLAT),  # a partition that fills up, again and again
        (series(lambda n: 200 - n / 4), Verdict.FLAT),
        (series(lambda n: 100 + n / 40), Verdict.FLAT),  # 4.5 MB, within the tolerance
        (series(lambda n: 100 + n / 10), Verdict.GROWING),
        (series(lambda n: 100 + n / 10 + NOISE[n]), Verdict.GROWING),
        (series(lambda n: max(0, n - 200)), Verdict.GROWING),
        (series(lambda n: 100 + n, count=9), Verdict.SHORT),
        (series(lambda n: 100 + n, tolerance=None), Verdict.SHOWN),
    ],
    ids=[
        *("constant", "noise", "fills up once", "saw-tooth", "falls", "grows a little"),
        *("leaks", "leaks with noise", "leaks later", "short", "not judged"),
    ],
)
def test_a_series_is_judged_by_its_second_half(found: Series, verdict: Verdict) -> None:
    assert found.verdict is verdict


def test_a_report_names_what_grows_and_what_is_lost() -> None:
    recorder = Recorder()
    recorder.series = {"drivers: memory": series(lambda n: 100 + n), "NATS: messages": series(lambda n: 0.0)}
    for name, one in recorder.series.items():
        one.name = name
    result = Result(Plan(minutes=60, seed=7), recorder, outcome=Outcome(lost=2, failed=["pool 8: failed"]))
    assert failed(result) == ["2 lost", "1 executions failed", "drivers: memory grows"]
    text = report(result)
    assert re.search(r"\| drivers: memory \| MB \| 118 \| 280 \| 442 \| 179 \| 37.0 \| \*\*growing\*\* \|", text), text
    assert "| seed | 7 |" in text


@pytest.mark.slow
def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    """Whether series are flat cannot be seen in a minute."""
    file = tmp_path / "report.md"
    small = ["--executions", "8", "--items", "1000", "--workers", "2", "--churn", "5", "--sample", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", "1", "--seed", "7", "--report", str(file), *small],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    text = file.read_text()
    reasons = [line for line in ran.stdout.split("the load ends")[-1].splitlines()[1:] if not line.endswith(" grows")]
    assert not reasons or reasons == ["flat; nothing lost, nothing doubled"], ran.stdout + text
    assert "| lost | 0 |" in text
    assert "| doubled | 0 |" in text
    assert re.search(r"1,000 in the largest loop", text), text
    assert all(f" {kind}" in text for kind in ("pool", "loop", "parallel")), text
