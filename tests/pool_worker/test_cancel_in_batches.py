"""A worker holds commands of two executions, and one of the executions is cancelled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import EventTransport, Settings
from tests.pool import working
from tests.pool_worker.conftest import control_plane
from tests.waiting import until
from tests.whole import ENDS, EVENTS, Fan, held_rows, nothing_left, warm


async def test_half_of_what_a_worker_holds_is_cancelled(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.pool_worker.claimer.KEPT_SECONDS", 1000.0)
    monkeypatch.setattr("noetl_dagster.pool_worker.claimer.AHEAD_SECONDS", 1.0)  # short on a busy machine too
    async with control_plane(settings, EventTransport.NATS) as own:
        engine = await Engine.open(own)
        pool = engine.runtime.pool
        async with working(own, "w", worker_slots=4):
            await warm(engine)
            kept = await Fan.start(engine, tmp_path, 12, name="kept", held=12)
            given_up = await Fan.start(engine, tmp_path, 12, name="given up", held=12)

            async def all_claimed() -> bool:
                return len(await held_rows(pool, "w")) == 24 and len(kept.begun + given_up.begun) == 4

            await until(all_claimed, "claims of both executions")
            begun = len(given_up.begun)
            await engine.lifecycle.cancel(given_up.execution_id, "enough")
            kept.go()
            await kept.is_whole()
            await given_up.cancelled()
            assert len(given_up.begun) == begun, "nothing of it was begun any more"
        ends = dict(await pool.fetch(ENDS, given_up.execution_id))
        assert len(ends) == 12
        assert set(ends.values()) == {1}
        found = Counter(dict(await pool.fetch(EVENTS, given_up.execution_id)))
        assert found["command.claimed"] == found["loop.shard.failed"] == 12
        assert not found["loop.shard.done"] + found["loop.fanin.completed"] + found["step.exit"]
        await nothing_left(pool)
        await engine.close()
