"""How long a session keeps the plans of its statements."""

from __future__ import annotations

import asyncpg
import pytest

from noetl_dagster.events.connection import open_pool
from noetl_dagster.settings import Settings

PLAN = "EXPLAIN EXECUTE sought (1)"


@pytest.mark.parametrize(("seconds", "kept"), [(1_000.0, True), (0.0, False)])
async def test_a_plan_outlives_the_table_that_it_was_made_for_by_moments(
    settings: Settings, pool: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: bool
) -> None:
    monkeypatch.setattr("noetl_dagster.events.connection._YOUNG_SECONDS", seconds)
    await pool.execute("CREATE TABLE grown (a int, b int) WITH (autovacuum_enabled = off)")
    await pool.execute("CREATE INDEX ON grown (a)")
    assert settings.db_url is not None
    session = await open_pool(settings.db_url, size=1)
    await session.execute("PREPARE sought (int) AS SELECT b FROM grown WHERE a = $1")
    before = await session.fetch(PLAN)
    await pool.execute("INSERT INTO grown SELECT n, n FROM generate_series(1, 100000) AS n")
    assert (await session.fetch(PLAN) == before) == kept
    await session.close()
