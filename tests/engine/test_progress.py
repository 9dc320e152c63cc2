"""How far a loop is, how fast it goes, and when it will be over."""

from __future__ import annotations

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.progress import Pace, duration, loop_progress

from .conftest import Run


def test_the_pace_is_that_of_the_last_half_minute() -> None:
    pace = Pace()
    assert pace.describe(100) == ""
    pace.see(5_000, 0.0)  # done by an earlier run
    assert pace.remaining(20_000) is None
    for second in range(1, 60):
        pace.see(5_000 + 100 * second, float(second))
    assert pace.rate == 100
    assert pace.describe(20_900) == "100/s, 1 min 40 s left"
    for second in range(60, 120):
        pace.see(10_900, float(second))
    assert pace.rate == 0, "it stands still"
    assert pace.describe(20_000) == ""


def test_durations_are_for_people() -> None:
    assert [duration(seconds) for seconds in (0.2, 40, 200, 7_500)] == [
        "0 s",
        "40 s",
        "3 min 20 s",
        "2 h 5 min",
    ]


async def test_counts_come_from_the_log(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: [1, 2, 0, 4], iterator: n}
            spec: {loop_mode: fanout, fanout: {max_shard_retries: 1, allow_partial: true}}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = 1 / n"}
        """
    )
    (progress,) = await loop_progress(engine.runtime.pool, state.execution_id)
    assert (progress.total, progress.done, progress.failed, progress.fanout) == (4, 3, 1, True)
    assert progress.rate > 0
    assert str(progress) == "fan: 4 of 4 (100 %) done, 1 failed"
