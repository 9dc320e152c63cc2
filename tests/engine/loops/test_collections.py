"""What a loop goes over: lists, tables and results that are stored already, which it never holds as a whole."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.loops.collection import (
    PART_BYTES,
    PART_ITEMS,
    evaluate_collection,
    items_a_part,
    keep_collection,
    kept_collection,
)
from noetl_dagster.engine.loops.gather import iteration_ends
from noetl_dagster.engine.loops.loop_run import begin_loop
from noetl_dagster.errors import ToolError
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.settings import Settings
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import NewResult
from noetl_dagster.worker.command import Outcome
from tests.engine.conftest import Run
from tests.playbooks import playbook


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with which collections of more than a hundred items are references."""
    return settings.model_copy(update={"loop_collection_threshold": 100})


@pytest.mark.parametrize(
    ("characters", "items"), [(10, PART_ITEMS), (100_000, PART_BYTES // 100_003), (2 * PART_BYTES, 1)]
)
def test_a_part_of_a_stored_collection_is_small_whatever_its_items(characters: int, items: int) -> None:
    assert items_a_part(["x" * characters] * 3) == items


TABLE = """
workload: {rows: 3}
workflow:
  - step: start
    tool:
      kind: python
      input: {rows: "{{ rows }}"}
      code: |
        import pyarrow as pa
        result = pa.table({"n": range(rows), "name": [f"row {n}" for n in range(rows)]})
    next: [fan]
  - step: fan
    loop: {in: "{{ start.data }}", iterator: row}
    spec: {loop_mode: fanout, fanout: {max_groups: 2, iter_key: "{{ row.name }}"}}
    tool: {kind: python, input: {n: "{{ row.n }}"}, code: "result = n"}
    next: [end]
  - {step: end, tool: {kind: python, input: {found: "{{ fan.results }}"}, code: "result = sum(found)"}}
"""


@pytest.mark.parametrize("rows", [3, 110])
async def test_rows_of_a_stored_table_are_items(run: Run, engine: Engine, rows: int) -> None:
    state = await run(TABLE, rows=rows)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == sum(range(rows))
    key = "SELECT meta ->> 'iter_key' FROM noetl.event WHERE event_type = 'loop.shard.done' AND current_index = 2"
    assert await engine.runtime.pool.fetchval(key) == "row 2"


@pytest.mark.long
async def test_results_of_a_fan_out_are_items_of_the_next(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: first
            loop: {in: "{{ range(110) }}", iterator: n}
            spec: {loop_mode: fanout}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n}"}
            next: [second]
          - step: second
            loop: {in: "{{ first.data }}", iterator: found}
            spec: {loop_mode: fanout, fanout: {granularity: partition, max_groups: 5}}
            tool: {kind: python, input: {n: "{{ found.n }}"}, code: "result = n + 1"}
            next: [end]
          - {step: end, tool: {kind: python, input: {found: "{{ second.data }}"}, code: "result = sum(found)"}}
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == sum(range(1, 111))


async def test_a_stored_collection_stays_where_it_is_until_it_is_read_part_by_part(engine: Engine) -> None:
    execution = await engine.lifecycle.create(playbook(TABLE))
    results, program = engine.runtime.results, execution.program.step("fan")
    parts = await results.put_many(
        [
            NewResult(list(range(start, start + 700)), execution.id, "start", f"part-{start}")
            for start in range(0, 4_900, 700)
        ]
    )
    manifest = await results.manifest(execution.id, "start", "whole", parts, Strategy.CONCAT)
    result = ResultView({"status": "ok", "ref": manifest}, ReferenceCache())

    found = await evaluate_collection(
        engine.runtime, program, execution.scope(ReferenceCache(), "start").with_locals({"start": result})
    )
    assert found == manifest, "not fetched"
    context = await keep_collection(engine.runtime, execution.visit("fan"), found, "1")
    collection = kept_collection(engine.runtime, context)
    assert len(collection) == 4_900
    assert await collection.slice(1_999, 2_002) == [1_999, 2_000, 2_001]
    assert await collection.slice(4_898, 5_000) == [4_898, 4_899]


async def test_an_iteration_that_succeeded_stays_so_when_a_failure_comes_later(engine: Engine) -> None:
    text = """
        workflow:
          - step: start
            loop: {in: [4, 5], iterator: n}
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
        """
    state = await engine.run(playbook(text))
    execution = await engine.runtime.load(state.execution_id)
    loop_run = await begin_loop(engine.runtime, execution.visit("start"))
    again = loop_run.iteration(0, 4, attempt=2)  # by a worker that had lost its claim
    await engine.runtime.log.append(
        [engine.runtime.commands.ended(again, Outcome(error_envelope(ToolError("too late", kind="worker"))))]
    )
    ends = [(end.index, end.failed) async for end in iteration_ends(loop_run, 2)]
    assert ends == [(0, False), (1, False)]
