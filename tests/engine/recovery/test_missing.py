"""Results whose bytes are missing are made again by a resumption, and nothing else is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.verify import Report, forget_missing, verify
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.settings import StoreTier
from tests.playbooks import playbook

FLOW = """
workload: {folder: ""}
workflow:
  - step: start
    tool: {kind: python, input: {folder: "{{ workload.folder }}"}, code: "CODE result = ['s' * 30_000] * 2"}
    set: {ctx.begun: "first"}
    next: [each]
  - step: each
    loop: {in: "{{ range(12) | list }}", iterator: n, mode: MODE}
    tool:
      kind: python
      input: {n: "{{ n }}", folder: "{{ workload.folder }}"}
      code: "CODE result = {'n': n, 'text': 'x' * 30_000}"
    SPEC
    next: [unused]
  - step: unused
    tool: {kind: python, input: {folder: "{{ workload.folder }}"}, code: "CODE result = 'u' * 30_000"}
    set: {ctx.begun: "second"}
    next: [total]
  - step: total
    tool:
      kind: python
      input: {start: "{{ start }}", each: "{{ each.results }}", begun: "{{ ctx.begun }}", folder: "{{ workload.folder }}"}
      code: |
        from pathlib import Path
        if not Path(folder, "go").exists():
            raise ValueError("not yet")
        result = {"start": len(start[0]), "each": sorted(one["n"] for one in each), "begun": begun}
"""


def flow(mode: str, spec: str = "") -> str:
    """The playbook, each of whose commands writes a line into the ledger."""
    text = FLOW.replace("MODE", mode).replace("SPEC", spec)
    for step in ("start", "each", "unused"):
        line = "{n}" if step == "each" else ""
        code = f"open(folder + '/ledger', 'a').write(f'{step}{line} ');"
        text = text.replace("CODE", code, 1)
    return text


async def removed(engine: Engine, step: str, number: int | None = None) -> int:
    """Deletes the objects of a step from the store, or those of its first iterations; returns how many.

    The place of the iteration is in the name (``task_0-3-1-1``). References have the order in which results were
    written, which is another one.
    """
    rows = await engine.runtime.pool.fetch(
        "SELECT store_tier, physical_uri FROM noetl.result_ref WHERE source_step = $1 AND kind = 'object' "
        "AND store_tier <> 'eventlog' ORDER BY string_to_array(split_part(name, '_', 2), '-')::int[] LIMIT $2",
        step,
        number,
    )
    for row in rows:
        tier = engine.runtime.results._placement.tier(StoreTier(row["store_tier"]))
        await tier.delete(row["physical_uri"])
    return len(rows)


async def checked(engine: Engine) -> Report:
    await engine.runtime.buffer.flush()
    await engine.projecting.close()
    return await verify(engine.runtime.pool, engine.runtime.results)


def begun(folder: Path) -> Counter[str]:
    return Counter((folder / "ledger").read_text().split())


@pytest.mark.parametrize(("mode", "spec"), [("sequential", ""), ("parallel", "spec: {loop_mode: fanout}")])
async def test_missing_results_are_made_again(engine: Engine, tmp_path: Path, mode: str, spec: str) -> None:
    state = await engine.run(playbook(flow(mode, spec)), {"folder": str(tmp_path)})
    assert state.status == "FAILED"
    once = begun(tmp_path)
    assert set(once.values()) == {1}
    assert await removed(engine, "start") == 1
    assert await removed(engine, "each", 3) == 3
    assert await removed(engine, "unused") == 1
    report = await checked(engine)
    assert report.findings.counts == {"object.missing": 5}

    (tmp_path / "go").touch()
    forgotten = await forget_missing(engine.runtime, report.missing)
    assert (forgotten.executions, forgotten.results) == ([state.execution_id], 4)
    assert "unused are not made again: no step that is still to run names its result" in forgotten.obstacles[0]
    assert {*(await checked(engine)).findings.counts} >= {"reference.unrecorded", "object.missing"}
    resumed = await engine.resume(state.execution_id)

    assert resumed.status == "COMPLETED", resumed.error
    assert resumed.latest["total"].envelope["data"] == {"start": 30_000, "each": list(range(12)), "begun": "second"}
    again = begun(tmp_path) - once
    assert again == {"start": 1, "each0": 1, "each1": 1, "each2": 1}
    assert (await checked(engine)).findings.counts == {"object.missing": 1}  # that of the unused step


def test_a_driver_at_work_keeps_the_ends_it_has() -> None:
    """What is lost in an epoch is made again after it."""
    ended = {"visit": 1, "epoch": 1, "fired": []}
    events = [
        Event(7, 1, EventType.PLAYBOOK_INITIALIZED, "sample", meta={"epoch": 1}),
        Event(7, 2, EventType.STEP_EXIT, "load", status="COMPLETED", meta=ended),
        Event(7, 3, EventType.EXECUTION_RESUMED, "sample", meta={"epoch": 2}),
        Event(7, 4, EventType.WARNING, "sample", meta={"epoch": 2, "lost": [["load", 1]]}),
    ]
    state = ExecutionState.fold(7, events)
    assert state.end_of("load", 1) is not None
    state.apply(Event(7, 5, EventType.EXECUTION_RESUMED, "sample", meta={"epoch": 3}))
    assert state.end_of("load", 1) is None
    state.apply(Event(7, 6, EventType.STEP_EXIT, "load", status="COMPLETED", meta=ended | {"epoch": 3}))
    assert state.end_of("load", 1) is not None


async def test_an_execution_without_its_results_fails_and_names_one(engine: Engine, tmp_path: Path) -> None:
    state = await engine.run(playbook(flow("parallel")), {"folder": str(tmp_path)})
    await removed(engine, "start")
    (tmp_path / "go").touch()
    failed = await engine.resume(state.execution_id)
    assert failed.status == "FAILED"
    assert "/result/start/" in str(failed.error)
    report = await checked(engine)
    await forget_missing(engine.runtime, report.missing)
    assert (await engine.resume(state.execution_id)).status == "COMPLETED"
    assert (await checked(engine)).is_clean


async def test_what_a_sink_has_written_does_not_run_again(engine: Engine, tmp_path: Path) -> None:
    sink = f"sink: {{tool: duckdb, database: {tmp_path}/rows.duckdb, table: rows}}"
    state = await engine.run(playbook(flow("parallel", sink)), {"folder": str(tmp_path)})
    assert state.status == "FAILED"
    await removed(engine, "each", 2)
    forgotten = await forget_missing(engine.runtime, (await checked(engine)).missing)
    assert forgotten.executions == []
    assert forgotten.obstacles == [
        f"execution {state.execution_id}: the missing results of each are not made again: its sink has written them"
    ]


async def test_an_execution_that_has_completed_keeps_its_references(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    state = await engine.run(playbook(flow("parallel")), {"folder": str(tmp_path)})
    await removed(engine, "start")
    forgotten = await forget_missing(engine.runtime, (await checked(engine)).missing)
    assert forgotten.obstacles == [f"execution {state.execution_id} is COMPLETED and cannot be resumed"]
    assert (await checked(engine)).findings.counts == {"object.missing": 1}
