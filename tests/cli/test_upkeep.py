"""Upkeep by hand: each command does what is due once, and ``replay --all`` restores the rows of the projection."""

from __future__ import annotations

from typing import Any

import asyncpg

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.projection import Projection
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from tests.cli.conftest import Cli
from tests.playbooks import text_of
from tests.waiting import until

PLAYBOOK = text_of(
    "replayed",
    """
    workload: {n: 3, bad: -1}
    workflow:
      - step: start
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = list(range(n))"}
        set: {ctx.size: "{{ n }}"}
        next: [each]
      - step: each
        loop: {in: "{{ start.data }}", iterator: item}
        tool: {kind: python, input: {item: "{{ item }}", bad: "{{ bad }}"}, code: "assert item != bad"}
        next: [end]
      - step: end
        tool: {kind: noop}
    """,
)
EVERYTHING = "SELECT * FROM noetl.execution ORDER BY execution_id"
ENDED = "SELECT FROM noetl.execution WHERE status <> 'RUNNING'"


async def executed(settings: Settings) -> None:
    """Four executions, of which one fails."""
    engine = await Engine.open(settings)
    try:
        playbook = parse_playbook(PLAYBOOK, file="replayed.yaml")
        for workload in ({}, {"n": 40}, {"n": 0}, {"bad": 1}):
            await engine.run(playbook, workload)
    finally:
        await engine.close()


def test_each_does_what_is_due_and_says_so(cli: Cli) -> None:
    for command, said in (
        ("project", "0 events projected"),
        ("reap", "0 silent commands given to others"),
        ("maintain", "partitions made: none"),
    ):
        done = cli(command)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


async def test_a_truncated_projection_comes_back(cli: Cli, settings: Settings, pool: asyncpg.Pool) -> None:
    await executed(settings)
    projection = Projection(pool)

    async def projected() -> bool:  # transactions of other databases of the server hold it back
        await projection.catch_up()
        return len(await pool.fetch(ENDED)) == 4

    await until(projected, "the projection")
    before: list[dict[str, Any]] = [dict(row) for row in await pool.fetch(EVERYTHING)]
    assert [row["status"] for row in before] == ["COMPLETED", "COMPLETED", "COMPLETED", "FAILED"]
    await pool.execute("TRUNCATE noetl.execution")
    done = cli("replay", "--all")
    assert done.returncode == 0, done.stderr
    assert "events replayed" in done.stdout
    after = [dict(row) for row in await pool.fetch(EVERYTHING)]
    assert after == before
    assert await projection.catch_up() == 0, "workers go on where the replay ended"
