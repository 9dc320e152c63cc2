"""Every playbook of the corpus runs as it says, without Dagster."""

from __future__ import annotations

from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.verify import verify
from noetl_dagster.errors import PlaybookError
from noetl_dagster.playbook.loader import load_playbook

from .conftest import TOKEN
from .expectation import Expectation, playbooks

SECRETS = "SELECT count(*) FROM noetl.event AS e WHERE e::text LIKE '%' || $1 || '%'"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", playbooks(), ids=lambda path: path.stem)
async def test_it_runs_as_it_says(path: Path, shared_engine: Engine, api: str) -> None:
    expected = Expectation.of(path)
    if expected.refused:
        with pytest.raises(PlaybookError) as refusal:
            load_playbook(path)
        assert expected.refused in str(refusal.value)
        return
    playbook = load_playbook(path)
    given = expected.given | ({"api": api} if "api" in playbook.workload else {})
    state = await shared_engine.run(playbook, given)
    await expected.check(state, shared_engine.runtime)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_secret_reached_the_log(shared_engine: Engine) -> None:
    assert await shared_engine.runtime.pool.fetchval(SECRETS, TOKEN) == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_all_of_it_verifies(shared_engine: Engine) -> None:
    runtime = shared_engine.runtime
    report = await verify(runtime.pool, runtime.results)
    assert report.is_clean, str(report)
