"""A run whose process is killed goes on where it stopped; what was done is not done again."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import asyncpg

from tests.forked import Forked
from tests.ledger import assert_only_unfinished_ran_again, written_by
from tests.playbooks import text_of

from .conftest import Cli

ITEMS = 60

PLAYBOOK = text_of(
    "ledger",
    """
    workload: {items: 60, ledger: ""}
    workflow:
      - step: start
        tool: {kind: python, input: {n: "{{ items }}"}, code: "result = list(range(n))"}
        next: [write]
      - step: write
        loop: {in: "{{ start.data }}", iterator: n}
        spec: {loop_mode: fanout, fanout: {max_groups: 4, max_concurrent: 3}}
        tool: TOOL
        next: [total]
      - step: total
        tool: {kind: python, input: {items: "{{ write.results }}"}, code: "result = sum(items)"}
    """,
).replace("TOOL", written_by("begun > 40"))  # the last third waits until the first process is dead


async def test_a_killed_fan_out_is_resumed(
    cli: Cli, environment: dict[str, str], pool: asyncpg.Pool, tmp_path: Path
) -> None:
    playbook, ledger = tmp_path / "ledger.yaml", tmp_path / "ledger.txt"
    playbook.write_text(PLAYBOOK)
    process = Forked(
        *("noetl-dagster", "run", str(playbook), "--set", f"ledger={ledger}", "--json"),
        environment=environment,
        folder=tmp_path,
        output=tmp_path / "killed.txt",
    )
    await _until_done(pool, ITEMS // 3)
    process.kill()
    finished = {row["current_index"] for row in await _done(pool)}
    assert ITEMS // 3 <= len(finished) < ITEMS, "it was killed in the middle"
    (tmp_path / "go").touch()
    execution_id = await pool.fetchval("SELECT min(execution_id) FROM noetl.event")

    resumed = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")

    assert resumed.returncode == 0, resumed.stderr
    overview = json.loads(resumed.stdout)
    assert overview["status"] == "COMPLETED"
    assert overview["epoch"] == 2
    assert_only_unfinished_ran_again(ledger, ITEMS, finished)
    assert len(await _done(pool)) == ITEMS
    issued = "SELECT meta ->> 'command_id' AS id FROM noetl.event WHERE event_type = 'command.issued'"
    ids = [row["id"] for row in await pool.fetch(issued)]
    assert len(ids) == len(set(ids)), "at most one command.issued a command"
    fanins = "SELECT count(*) FROM noetl.event WHERE event_type = 'loop.fanin.completed'"
    assert await pool.fetchval(fanins) == 1
    total = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = 'total'"
    assert await pool.fetchval(total) == sum(range(ITEMS))


async def test_an_execution_that_has_ended_is_not_resumed(cli: Cli, tmp_path: Path) -> None:
    playbook = tmp_path / "ledger.yaml"
    playbook.write_text(PLAYBOOK)
    ledger = tmp_path / "ledger.txt"
    run = await asyncio.to_thread(cli, "run", str(playbook), "--set", "items=2", "--set", f"ledger={ledger}", "--json")
    assert run.returncode == 0, run.stderr
    execution_id = json.loads(run.stdout)["execution_id"]

    again = await asyncio.to_thread(cli, "resume", execution_id)

    assert again.returncode == 1
    assert "is COMPLETED" in again.stderr


async def _done(pool: asyncpg.Pool) -> list[asyncpg.Record]:
    return list(await pool.fetch("SELECT current_index FROM noetl.event WHERE event_type = 'loop.shard.done'"))


async def _until_done(pool: asyncpg.Pool, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(await _done(pool)) < count:
        assert time.monotonic() < deadline, "the run makes no progress"
        await asyncio.sleep(0.05)
