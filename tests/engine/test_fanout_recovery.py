"""Fan-outs whose processes die: only unfinished shards run again, and sinks have each result once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.shards import Group
from noetl_dagster.events.state import StepStatus
from noetl_dagster.settings import Settings
from tests.ledger import assert_only_unfinished_ran_again
from tests.waiting import until

from .conftest import playbook

GROUP = """
import asyncio, sys
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.shards import Group
from noetl_dagster.settings import Settings

async def main(execution_id, key):
    engine = await Engine.open(Settings())
    execution = await engine.runtime.load(int(execution_id))
    await engine.fanouts.run_group(execution, "fan", Group.parse(key))
    await engine.close()

asyncio.run(main(*sys.argv[1:]))
"""

DONE = "SELECT current_index FROM noetl.event WHERE event_type = 'loop.shard.done'"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The playbooks' credential is the event log's own database."""
    return settings.model_copy(update={"default_postgres_credential": "embedded"})


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


async def test_a_killed_group_runs_only_what_it_had_not_finished(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger.txt"
    parsed = playbook(
        """
        workload: {ledger: ""}
        workflow:
          - step: fan
            loop: {in: "{{ range(40) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 3}}
            tool:
              kind: python
              input: {n: "{{ n }}", ledger: "{{ ledger }}"}
              code: |
                import pathlib, time
                with open(ledger, "a") as file:
                    file.write(f"{n}\\n")
                while n % 20 >= 10 and not pathlib.Path(ledger).with_name("go").exists():
                    time.sleep(0.01)  # half of a group waits until the first process is dead
                result = n
        """
    )
    execution = await engine.lifecycle.create(parsed, {"ledger": str(ledger)})
    first, second = (await engine.fanouts.expand(execution, "fan")).groups

    group = await _start(settings, execution.id, first)
    await until(lambda: done(engine, 6), "shards of the first group")
    os.kill(group.pid, signal.SIGKILL)
    await group.wait()
    finished = {row["current_index"] for row in await engine.runtime.pool.fetch(DONE)}
    assert 6 <= len(finished) < len(first) == 20
    (tmp_path / "go").touch()
    again, other = await _start(settings, execution.id, first), await _start(settings, execution.id, second)
    assert await again.wait() == 0
    assert await other.wait() == 0

    end = await engine.fanouts.fan_in(await engine.runtime.load(execution.id), "fan")

    assert end.envelope["done"] == 40
    assert_only_unfinished_ran_again(ledger, 40, finished)
    assert len(await _events(engine, "command.issued")) == 40
    assert len(await _events(engine, "loop.fanin.completed")) == 1


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


async def done(engine: Engine, count: int) -> bool:
    return len(await engine.runtime.pool.fetch(DONE)) >= count


async def _start(settings: Settings, execution_id: int, group: Group) -> asyncio.subprocess.Process:
    """A process of its own that runs one group."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        GROUP,
        str(execution_id),
        group.key,
        env={**inherited, **embedded.environment(settings)},
    )


async def _events(engine: Engine, kind: str) -> list[Any]:
    return list(await engine.runtime.pool.fetch("SELECT * FROM noetl.event WHERE event_type = $1", kind))
