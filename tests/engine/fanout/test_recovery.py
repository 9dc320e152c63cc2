"""Fan-outs that several processes drive, and that are resumed: each result once, and only what failed runs again.

Of killed processes see ``compiler/test_killed_runs.py``, ``pool_worker/test_killed_driver.py`` and ``test_spark.py``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.fanout.shards import Group
from noetl_dagster.events.state import StepStatus
from noetl_dagster.settings import Settings
from tests.playbooks import playbook


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The playbooks' credential is the event log's own database."""
    return settings.model_copy(update={"default_postgres_credential": "embedded"})


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


async def test_a_sink_has_each_shard_once(engine: Engine) -> None:
    await engine.runtime.pool.execute(
        "CREATE TABLE taken (execution_id bigint, loop_id text, shard_id text, n int, tries int, "
        "PRIMARY KEY (execution_id, loop_id, shard_id))"
    )
    parsed = playbook(
        """
        workflow:
          - step: fan
            loop: {in: "{{ range(60) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 8}}
            tool:
              kind: python
              input: {n: "{{ n }}", attempt: "{{ _attempt }}"}
              code: |
                if n % 20 == 3 and attempt == 1:
                    raise ValueError("not yet")
                result = {"n": n, "tries": attempt}
              sink:
                {tool: postgres, auth: pg, table: taken, mode: upsert, key: [execution_id, loop_id, shard_id]}
        """
    )
    execution = await engine.lifecycle.create(parsed)
    groups = (await engine.fanouts.expand(execution, "fan")).groups

    async def work(group: Group) -> None:
        await engine.fanouts.run_group(await engine.runtime.load(execution.id), "fan", group)

    await asyncio.gather(*map(work, [*groups, *groups]))  # as if Dagster had started each of them twice
    end = await engine.fanouts.fan_in(await engine.runtime.load(execution.id), "fan")

    assert end.status is StepStatus.COMPLETED, end.error
    rows = await engine.runtime.pool.fetch("SELECT n, tries FROM taken ORDER BY n")
    assert [row["n"] for row in rows] == list(range(60))
    assert len(await _events(engine, "loop.shard.done")) == 60


async def test_failed_shards_of_an_ended_fan_in_run_again_on_resume(engine: Engine, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    parsed = playbook(
        """
        workload: {proof: ""}
        workflow:
          - step: fan
            loop: {in: "{{ range(20) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {max_groups: 2, max_shard_retries: 0}}
            tool:
              kind: python
              input: {n: "{{ n }}", proof: "{{ proof }}"}
              code: |
                import os
                if n in (4, 15) and not os.path.exists(proof):
                    raise ValueError("not yet")
                result = n
        """
    )
    failed = await engine.run(parsed, {"proof": str(proof)})
    assert "2 of 20" in (failed.error or "")
    proof.touch()

    resumed = await engine.resume(failed.execution_id)

    assert resumed.error is None
    assert resumed.latest["fan"].envelope["done"] == 20
    claimed = Counter(row["current_index"] for row in await _events(engine, "command.claimed"))
    assert {index for index, count in claimed.items() if count == 2} == {4, 15}
    assert sum(claimed.values()) == 22


async def _events(engine: Engine, kind: str) -> list[Any]:
    return list(await engine.runtime.pool.fetch("SELECT * FROM noetl.event WHERE event_type = $1", kind))
