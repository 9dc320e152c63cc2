"""Every rule of ``noetl-dagster verify`` finds its own defect, and sound executions break none."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.verify import RULES, Report, verify
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.projection import differing
from noetl_dagster.events.rules import broken_rules
from noetl_dagster.events.schema import apply_schema_on
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.locations import file_sizes
from noetl_dagster.storage.placement import key_of
from noetl_dagster.storage.tiers.files import path_of_uri
from tests.playbooks import playbook
from tests.waiting import until_projected

FLOW = """
workflow:
  - step: start
    tool: {kind: python, code: "result = list(range(8))"}
    next: [each, split]
  - step: each
    loop: {in: "{{ start }}", iterator: n}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n, 'text': 'x' * 30_000}"}
    next: [total]
  - step: split
    loop: {in: "{{ start }}", iterator: n}
    spec: {loop_mode: fanout}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
    next: [total]
  - step: total
    tool: {kind: python, input: {n: "{{ split.results }}"}, code: "result = len(n)"}
"""
CANCELLED = """
workflow:
  - step: begin
    tool: {kind: python, code: "result = 1"}
"""

COPY = """
INSERT INTO noetl.event (execution_id, event_id, event_type, node_name, status, result, meta, current_index, created_at,
    xact_id)
SELECT execution_id, 2, event_type, node_name, status, result, meta, current_index, created_at, xact_id FROM noetl.event
WHERE {} ORDER BY event_id LIMIT 1
"""
DELETE = "DELETE FROM noetl.event WHERE {}"
UPDATE = "UPDATE noetl.event SET {} WHERE {}"
ADD = """
INSERT INTO noetl.event (execution_id, event_id, event_type, node_name, meta, xact_id)
SELECT max(execution_id), 1, '{}', 'each', '{}', GREATEST(max(xact_id::text::bigint) + 1, (
    SELECT max(xact_id::text::bigint) FROM noetl.projection_checkpoint))::text::xid8 FROM noetl.event
"""
"""A further event, which the projection has not reached."""


def twice(which: str, index: str) -> str:
    """A second event, which the unique index would refuse."""
    return f"DROP INDEX noetl.{index}; {COPY.format(which)}"


FIRST = "event_id = (SELECT min(event_id) FROM noetl.event WHERE {})"
OF_EACH = "node_name = 'each' AND current_index = 1"

# by rule, a change of the log of a completed execution that breaks it; rules that it breaks too
DEFECTS: dict[str, tuple[str, set[str]]] = {
    "event.unknown_type": (ADD.format("step.entered", "{}"), set()),
    "event.incomplete": (ADD.format("command.heartbeat", "{}"), set()),
    "event.future": (UPDATE.format("xact_id = '9000000000000000'", FIRST.format("true")), {"execution.misprojected"}),
    "command.claimed_twice": (
        UPDATE.format("meta = meta || '{\"claim\": 2}'", f"event_type = 'command.claimed' AND {OF_EACH}")
        + ";"
        + twice(f"event_type = 'command.claimed' AND {OF_EACH}", "uidx_event_command_claim"),
        set(),
    ),
    "loop.ended_twice": (twice("event_type = 'loop.done'", "uidx_event_loop_done_loop_id"), set()),
    "step.turn_twice": (twice("event_type = 'step.enter'", "uidx_event_step_enter_turn"), set()),
    "step.ended_twice": (twice("event_type = 'step.exit'", "uidx_event_step_exit_visit"), set()),
    "check.evaluated_twice": (
        "DROP INDEX noetl.uidx_event_check_visit;"
        + ADD.format("check.evaluated", '{"visit": 1, "epoch": 1, "check": "few"}')
        + ";"
        + COPY.format("event_type = 'check.evaluated'"),
        set(),
    ),
    "chunk.stored_twice": (
        "DROP INDEX noetl.uidx_event_chunk;"
        + ADD.format("call.partial", '{"visit": 1, "attempt": 1, "command_id": "x", "chunk_index": 0}')
        + ";"
        + COPY.format("event_type = 'call.partial'"),
        set(),
    ),
    "execution.opened_twice": (
        twice("event_type = 'playbook.initialized'", "uidx_event_resumed_epoch"),
        set(),
    ),
    "execution.ended_twice": (
        twice("event_type = 'playbook.completed'", "uidx_event_terminal_epoch"),
        {"execution.half_ended"},
    ),
    "execution.reported_twice": (
        "DROP INDEX noetl.uidx_event_reported_epoch;"
        + ADD.format("execution.reported", '{"epoch": 1}')
        + ";"
        + COPY.format("event_type = 'execution.reported'"),
        set(),
    ),
    "execution.unstarted": (DELETE.format("event_type = 'playbook.initialized'"), {"execution.misprojected"}),
    "execution.epochs": (ADD.format("execution.resumed", '{"epoch": 3}'), set()),
    "execution.half_ended": (DELETE.format("event_type = 'workflow.completed'"), set()),
    "command.issued_twice": (
        twice(f"event_type = 'command.issued' AND {OF_EACH}", "uidx_event_command_issued_command_id"),
        set(),
    ),
    "command.ended_twice": (
        twice(f"event_type = 'command.completed' AND {OF_EACH}", "uidx_event_command_end_command_id"),
        set(),
    ),
    "command.unissued": (DELETE.format(f"event_type = 'command.issued' AND {OF_EACH}"), set()),
    "command.unclaimed": (DELETE.format(f"event_type = 'command.claimed' AND {OF_EACH}"), set()),
    "command.disordered": (
        UPDATE.format("xact_id = '5'", f"event_type = 'command.completed' AND {OF_EACH}"),
        set(),
    ),
    "command.lost": (
        DELETE.format("event_type = 'command.completed' AND node_name = 'total'"),
        set(),
    ),
    "step.unentered": (DELETE.format("event_type = 'step.enter' AND node_name = 'start'"), set()),
    "step.unended": (
        DELETE.format("event_type = 'step.exit' AND node_name = 'start'"),
        {"execution.misprojected"},
    ),
    "step.unreached": (
        DELETE.format("event_type IN ('step.enter', 'step.exit') AND node_name = 'total'"),
        {"execution.misprojected"},
    ),
    "loop.unstarted": (
        DELETE.format("event_type = 'loop.fanout.started'"),
        {"execution.misprojected"},
    ),
    "loop.open": (DELETE.format("event_type = 'loop.fanin.completed'"), {"execution.misprojected"}),
    "loop.outside": (UPDATE.format("current_index = 77", f"{OF_EACH} AND event_type <> 'loop.item'"), set()),
    "loop.miscounted": (
        DELETE.format(f"event_type IN ('command.completed', 'command.claimed') AND {OF_EACH}"),
        set(),
    ),
    "loop.unfinished": (
        UPDATE.format("meta = meta || '{\"done\": 2}'", "event_type = 'loop.done'"),
        {"execution.misprojected"},
    ),
    "queue.ended": (
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind) "
        "SELECT execution_id, meta ->> 'command_id', event_id, node_name, 'python' FROM noetl.event "
        f"WHERE event_type = 'command.issued' AND {OF_EACH}",
        set(),
    ),
    "queue.dead": (
        ADD.format("command.issued", '{"visit": 1, "attempt": 1, "command_id": "y"}')
        + ";INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, lease_until) "
        "SELECT max(execution_id), 'y', 1, 'each', 'python', 'leased', now() - interval '1 hour' FROM noetl.event",
        set(),
    ),
    "cursor.unreleased": (
        "INSERT INTO noetl.cursor_frame "
        "(execution_id, loop_id, first_index, step, visit, rows, by_row, lease_until, claim_xid) "
        "SELECT max(execution_id), '1', 0, 'each', 1, '[]', true, now() - interval '1 hour', 1 FROM noetl.event",
        set(),
    ),
    "reference.unrecorded": (
        "DELETE FROM noetl.result_ref WHERE ref_id = (SELECT min(ref_id) FROM noetl.result_ref WHERE kind = 'object')",
        {"manifest.incomplete"},
    ),
    "manifest.incomplete": (
        "DELETE FROM noetl.manifest_part WHERE part_index = 0",
        set(),
    ),
    "execution.misprojected": ("UPDATE noetl.execution SET status = 'FAILED'", set()),
}
ELSEWHERE = {
    "execution.late",
    "execution.resumed_cancelled",
    "execution.unreadable",
    "object.missing",
    "object.damaged",
    "object.orphan",
}


def test_every_rule_has_a_defect() -> None:
    assert DEFECTS.keys() | ELSEWHERE == RULES.keys()


async def test_a_defect_is_found_by_its_rule(engine: Engine) -> None:
    state = await engine.run(playbook(FLOW))
    await until_projected(engine.runtime.pool, state.execution_id, state.status)
    await engine.projecting.close()
    assert state.status == "COMPLETED", state.error
    pool = engine.runtime.pool
    assert await found(pool, state.execution_id, "SELECT") == set()
    wrong = {}
    for rule, (change, others) in DEFECTS.items():
        if (broken := await found(pool, state.execution_id, change)) != {rule} | others:
            wrong[rule] = broken
    assert wrong == {}, wrong


async def test_nothing_follows_a_cancellation(engine: Engine) -> None:
    execution = await engine.lifecycle.create(playbook(CANCELLED))
    assert await engine.lifecycle.cancel(execution.id)
    pool = engine.runtime.pool
    assert await found(pool, execution.id, "SELECT") == set()
    command = ADD.format("command.issued", '{"visit": 1, "attempt": 1, "command_id": "z"}')
    assert await found(pool, execution.id, command) == {"execution.late"}
    ended = ADD.format("step.exit", '{"visit": 1, "epoch": 1}')
    assert await found(pool, execution.id, ended) == {"execution.late", "step.unentered"}
    resumed = ADD.format("execution.resumed", '{"epoch": 2}')
    assert await found(pool, execution.id, resumed) == {"execution.resumed_cancelled"}


async def test_objects_are_compared_and_orphans_removed(engine: Engine) -> None:
    state = await engine.run(playbook(FLOW))
    await until_projected(engine.runtime.pool, state.execution_id, state.status)
    await engine.projecting.close()
    runtime, results = engine.runtime, engine.runtime.results
    assert (await checked(engine)).is_clean
    first, second = await runtime.pool.fetch(
        "SELECT ref_id, store_tier, physical_uri FROM noetl.result_ref WHERE kind = 'object' ORDER BY ref_id LIMIT 2"
    )
    tier = results._placement.tier(StoreTier(first["store_tier"]))
    key = first["physical_uri"].removeprefix(tier.uri(""))
    data = bytes(await tier.get(first["physical_uri"]))
    await tier.put(key, data[:-1] + b"?")
    await tier.delete(second["physical_uri"])
    old = snowflake_floor(datetime.now(UTC) - timedelta(days=3))
    orphan = await tier.put(key_of(state.execution_id, "each", "rows", old, ".json"), b"1")

    quick = await checked(engine, quick=True)
    assert quick.findings.counts == {"object.missing": 1, "object.orphan": 1}
    report = await checked(engine, repair=True)
    assert report.findings.counts == {"object.damaged": 1, "object.missing": 1, "object.orphan": 1}
    [missing] = report.findings.examples["object.missing"]
    assert (missing.execution_id, missing.step) == (state.execution_id, "each")
    assert report.repairs == ["object.orphan: 1 objects deleted"]
    assert not await tier.exists(orphan)
    assert (await checked(engine, execution_id=state.execution_id)).findings.counts.keys() == {
        "object.damaged",
        "object.missing",
    }


async def test_files_of_a_dataset_are_looked_for_in_its_folders(engine: Engine) -> None:
    """Their names are those of their addresses, in which characters of folders may be quoted."""
    state = await engine.run(playbook(FLOW))
    results = engine.runtime.results
    uri = results.dataset_uri(execution_id=state.execution_id, step="each", name="rows", tier=StoreTier.PVC)
    folder = path_of_uri(uri)
    files = [folder / f"facility={name}" / "part-0.parquet" for name in ("F 1", "F2")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"12345")
    sizes = file_sizes(engine.runtime.settings, uri)
    names = [name.removeprefix(f"{uri.rstrip('/')}/") for name in sizes]
    place = {"execution_id": state.execution_id, "step": "each"}
    await results.register_dataset(uri, **place, name="rows", files=names, bytes_size=sum(sizes.values()))
    assert (await checked(engine)).findings.counts == {}
    files[0].write_bytes(b"1")
    assert (await checked(engine)).findings.counts == {"object.damaged": 1}
    files[0].unlink()
    assert (await checked(engine)).findings.counts == {"object.missing": 1}


async def test_what_is_safe_is_repaired(engine: Engine) -> None:
    state = await engine.run(playbook(FLOW))
    await until_projected(engine.runtime.pool, state.execution_id, state.status)
    await engine.projecting.close()
    pool = engine.runtime.pool
    for rule in ("queue.ended", "queue.dead"):
        await pool.execute(DEFECTS[rule][0])
    await pool.execute(  # a claim of a command that was never issued
        "INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, lease_until) "
        "SELECT max(execution_id), 'z', 1, 'each', 'python', 'leased', now() - interval '1 hour' FROM noetl.event"
    )
    await pool.execute("DELETE FROM noetl.execution")
    report = await checked(engine, repair=True)
    assert report.findings.counts.keys() == {"execution.misprojected", "queue.dead", "queue.ended"}
    assert [line.partition(":")[0] for line in report.repairs] == [
        "execution.misprojected",
        "queue.dead",
        "queue.ended",
    ]
    assert (await checked(engine)).is_clean
    await until_projected(pool, state.execution_id, state.status)


UNREADABLE: list[tuple[str, set[str] | None]] = [
    (
        "UPDATE noetl.event SET meta = '[]' WHERE event_type = 'step.exit'",
        {"event.incomplete", "step.unentered", "step.unended"},
    ),
    ("UPDATE noetl.event SET meta = meta || '{\"epoch\": \"x\"}' WHERE event_type = 'playbook.completed'", set()),
    ("UPDATE noetl.event SET created_at = 'infinity' WHERE event_type = 'playbook.initialized'", set()),
    ("UPDATE noetl.execution SET state = '[1]' WHERE true", None),
]
"""Changes of an execution, and the rules that it then breaks beside being unreadable; None: its row is repaired."""


async def test_those_that_cannot_be_read_do_not_hold_up_the_others(engine: Engine) -> None:
    ids = []
    for _ in range(len(UNREADABLE) + 1):
        state = await engine.run(playbook(CANCELLED))
        # what the projection has not reached is no difference
        await until_projected(engine.runtime.pool, state.execution_id, state.status)
        ids.append(state.execution_id)
    await engine.projecting.close()
    *damaged, other = ids
    expected = {("execution.misprojected", other)}
    for execution_id, (change, rules) in zip(damaged, UNREADABLE, strict=True):
        await engine.runtime.pool.execute(f"{change} AND execution_id = $1", execution_id)
        own = {"execution.misprojected"} if rules is None else {"execution.unreadable", *rules}
        expected |= {(rule, execution_id) for rule in own}
    await engine.runtime.pool.execute("DELETE FROM noetl.execution WHERE execution_id = $1", other)
    report = await checked(engine, repair=True)
    examples = report.findings.examples
    assert {(rule, one.execution_id) for rule, found in examples.items() for one in found} == expected
    assert report.executions == len(ids)
    left = Counter(rule for rule, _ in expected if rule != "execution.misprojected")
    assert (await checked(engine)).findings.counts == left


async def test_a_log_of_another_server_is_adopted(engine: Engine) -> None:
    """A dump has the numbers of its server's transactions; a new server has not reached them."""
    flag = engine.runtime.settings.home / "go"
    text = f"from pathlib import Path\nassert Path('{flag}').exists()\nresult = 1"
    flow = FLOW + f"    next: [last]\n  - step: last\n    tool: {{kind: python, code: {json.dumps(text)}}}\n"
    failed = await engine.run(playbook(flow))
    await engine.projecting.close()
    pool = engine.runtime.pool
    for table in ("event", "projection_checkpoint"):
        await pool.execute(f"UPDATE noetl.{table} SET xact_id = (xact_id::text::bigint + 7000000000)::text::xid8")
    assert (await checked(engine)).findings.counts.keys() == {"event.future"}

    async with pool.acquire() as connection:
        await apply_schema_on(connection)
    assert (await checked(engine)).is_clean
    flag.touch()
    assert (await engine.resume(failed.execution_id)).status == "COMPLETED"
    await engine.projecting.close()
    await until_projected(pool, failed.execution_id, "COMPLETED")
    assert (await checked(engine)).is_clean


async def test_an_execution_that_is_not_there_cannot_be_checked(engine: Engine) -> None:
    with pytest.raises(LookupError, match="no execution 5"):
        await checked(engine, execution_id=5)


async def checked(engine: Engine, **options: Any) -> Report:
    return await verify(engine.runtime.pool, engine.runtime.results, **options)


async def found(pool: asyncpg.Pool, execution_id: int, change: str) -> set[str]:
    """The broken rules of an execution after a change that is rolled back."""
    for _ in range(2):
        await pool.fetchval("SELECT pg_current_xact_id()")  # a later transaction than the last event's has ended
    async with pool.acquire() as connection:
        change_made = connection.transaction()
        await change_made.start()
        try:
            await connection.execute(change)
            rules = {*(await broken_rules(connection, [execution_id])).counts}
            return rules | ({"execution.misprojected"} if await differing(connection, [execution_id]) else set())
        finally:
            await change_made.rollback()
