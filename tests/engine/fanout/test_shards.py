"""Fan-out: one command a shard, retries under the same name, and a fan-in that fires once (seed P3)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.fanout.shards import Group
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from tests.engine.conftest import Run
from tests.playbooks import playbook

EVENTS = "SELECT * FROM noetl.event WHERE execution_id = $1 AND event_type = $2 ORDER BY event_id"

ROUTED = """
            next:
              arcs:
                - {step: whole, when: "{{ fanin.status == 'complete' }}"}
                - {step: part, when: "{{ fanin.status == 'partial' }}"}
                - {step: none, when: "{{ fanin.status == 'failed' }}"}
          - {step: whole, tool: {kind: noop}}
          - step: part
            tool: {kind: python, input: {n: "{{ fan.failed }}"}, code: "result = n"}
          - {step: none, tool: {kind: noop}}
"""


def values(state: ExecutionState, step: str) -> list[Any]:
    """What the iterations of a small loop gave, in item order."""
    return [item["data"] for item in state.latest[step].envelope["results"]]


async def events(engine: Engine, state: ExecutionState, kind: str) -> list[Any]:
    return list(await engine.runtime.pool.fetch(EVENTS, state.execution_id, kind))


async def test_a_hundred_items_are_a_hundred_distinct_commands(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: "{{ range(100) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {max_groups: 4}}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    issued = await events(engine, state, "command.issued")
    tuples = {(row["meta"]["loop_id"], row["meta"]["shard_id"], row["meta"]["iter_index"]) for row in issued}
    assert len(issued) == len(tuples) == len({row["meta"]["command_id"] for row in issued}) == 100
    (started,) = await events(engine, state, "loop.fanout.started")
    assert started["meta"]["total_shards"] == 100
    for kind in ("loop.shard.enqueued", "command.claimed", "loop.shard.done"):
        assert len(await events(engine, state, kind)) == 100
    (fanin,) = await events(engine, state, "loop.fanin.completed")
    assert fanin["status"] == "complete"
    assert fanin["meta"]["loop_id"] == started["meta"]["loop_id"]
    assert values(state, "fan") == [n * n for n in range(100)]


async def test_shards_that_fail_once_complete_under_the_same_name(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: [a, b, c, d, e, f, g, h, i, j], iterator: name}
            spec: {loop_mode: fanout, fanout: {iter_key: "key-{{ name }}", max_concurrent: 3}}
            tool:
              kind: python
              input: {name: "{{ name }}", attempt: "{{ _attempt }}"}
              code: |
                if name in "cgi" and attempt == 1:
                    raise ValueError("not yet")
                result = name.upper()
        """.rstrip()
        + ROUTED
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert "whole" in state.latest
    assert values(state, "fan") == list("ABCDEFGHIJ")
    failed = await events(engine, state, "loop.shard.failed")
    assert sorted(row["meta"]["iter_index"] for row in failed) == [2, 6, 8]
    assert {row["meta"]["final"] for row in failed} == {False}
    attempts: dict[int, set[tuple[str, ...]]] = {}
    commands = [row["meta"] for row in await events(engine, state, "command.issued")]
    issued = Counter(meta["iter_index"] for meta in commands if "iter_index" in meta)
    assert issued == Counter(range(10)) + Counter([2, 6, 8])
    for row in [*failed, *await events(engine, state, "loop.shard.done")]:
        meta = row["meta"]
        names = meta["loop_id"], meta["shard_id"], meta["iter_key"]
        attempts.setdefault(meta["iter_index"], set()).add(names)
    assert all(len(names) == 1 for names in attempts.values()), "a retry keeps the names of its shard"


async def test_fail_fast_issues_no_more_work(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: "{{ range(40) | list }}", iterator: n}
            spec:
              loop_mode: fanout
              fanout: {fail_fast: true, max_concurrent: 2, max_groups: 8, max_shard_retries: 0}
            tool:
              kind: python
              input: {n: "{{ n }}"}
              code: |
                import time
                time.sleep(0.5 if n > 3 else 0)  # long enough to hear of the failure
                result = 1 / (n - 3)
        """.rstrip()
        + ROUTED
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert "part" in state.latest
    claimed = await events(engine, state, "command.claimed")
    assert 4 <= len(claimed) <= 6, "nothing begins after the failure"


async def test_a_shard_lives_no_longer_than_its_ttl(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: fan
            loop: {in: [0, 600], iterator: seconds}
            spec: {loop_mode: fanout, fanout: {shard_ttl: 1.5, max_shard_retries: 0, allow_partial: true}}
            tool:
              kind: python
              input: {seconds: "{{ seconds }}"}
              code: |
                import time
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(0.01)
                result = seconds
        """.rstrip()
        + ROUTED
    )
    error = state.latest["fan"].envelope["results"][1]["error"]
    assert error["kind"] == "timeout"
    assert "shard_ttl" in error["message"]


@pytest.mark.parametrize("items", ["[]", "[5]"])
async def test_few_items(run: Run, engine: Engine, items: str) -> None:
    state = await run(
        f"""
        workflow:
          - step: fan
            loop: {{in: {items}, iterator: n}}
            spec: {{loop_mode: fanout}}
            tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = n"}}
        """.rstrip()
        + ROUTED
    )
    assert "whole" in state.latest, state.error
    expected = [5] if items == "[5]" else []
    assert values(state, "fan") == expected
    (fanin,) = await events(engine, state, "loop.fanin.completed")
    assert fanin["meta"]["total"] == len(expected)


async def test_keys_of_shards_are_distinct(run: Run, engine: Engine) -> None:
    text = """
        workflow:
          - step: fan
            loop: {in: [{id: 1}, {id: 2}, {id: 1}], iterator: row}
            spec: {loop_mode: fanout, fanout: {iter_key: "{{ row.%s }}"}}
            tool: {kind: noop}
        """
    state = await run(text % "id")
    assert state.status is ExecutionStatus.FAILED
    assert "items 0 and 2" in (state.error or "")
    assert not await events(engine, state, "command.issued")
    state = await run(text % "missing")
    assert state.status is ExecutionStatus.FAILED
    assert "missing" in (state.error or "")


async def test_large_items_stay_out_of_the_log(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: python, code: "result = [str(n) * 200_000 for n in range(6)]"}
            next: [fan]
          - step: fan
            loop: {in: "{{ start.data }}", iterator: text}
            spec: {loop_mode: fanout}
            tool: {kind: python, input: {text: "{{ text }}"}, code: "result = [text[0], len(text)]"}
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert values(state, "fan") == [[str(n), 200_000] for n in range(6)]
    size = "SELECT max(pg_column_size(event.*)) FROM noetl.event WHERE execution_id = $1"
    assert await engine.runtime.pool.fetchval(size, state.execution_id) < 4096


async def test_groups_run_at_once_and_twice_and_the_fan_in_is_one(engine: Engine) -> None:
    parsed = playbook(
        """
        workflow:
          - step: fan
            loop: {in: "{{ range(60) | list }}", iterator: n}
            spec: {loop_mode: fanout, fanout: {max_groups: 4, max_concurrent: 5}}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
        """
    )
    execution = await engine.lifecycle.create(parsed)
    expanded = await engine.fanouts.expand(execution, "fan")
    assert len(expanded.groups) == 4
    again = await engine.fanouts.expand(await engine.runtime.load(execution.id), "fan")
    assert again.groups == expanded.groups
    groups = [*expanded.groups, *expanded.groups]

    async def work(group: Group) -> None:
        await engine.fanouts.run_group(await engine.runtime.load(execution.id), "fan", group)

    await asyncio.gather(*map(work, groups))
    ends = await asyncio.gather(
        *[engine.fanouts.fan_in(await engine.runtime.load(execution.id), "fan") for _ in range(4)]
    )
    state = execution.state
    assert len(await events(engine, state, "loop.fanin.completed")) == 1
    assert len(await events(engine, state, "step.exit")) == 1
    assert len(await events(engine, state, "loop.shard.done")) == 60
    assert len(await events(engine, state, "command.issued")) == 60
    assert {end.envelope["done"] for end in ends} == {60}


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
    claimed = Counter(row["current_index"] for row in await events(engine, resumed, "command.claimed"))
    assert {index for index, count in claimed.items() if count == 2} == {4, 15}
    assert sum(claimed.values()) == 22


def test_a_group_is_read_from_its_key() -> None:
    assert Group.parse(Group(3, 8).key) == Group(3, 8)
