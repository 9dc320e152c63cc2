"""Playbooks over results that are in chunks: loops, checks, selected fields, code, as over small ones."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.playbooks import playbook

pytestmark = pytest.mark.long

TEXT = """
workload: {}
workflow:
  - step: start
    output: {output_select: [row_count, rows.1.name]}
    tool: {kind: postgres, auth: x, command: "select n as id, 'name ' || n as name, n * 1.5 as price from generate_series(1, 600) as n"}
    checks:
      - {name: enough, row_count: {min: 600, max: 600}}
      - {name: unique_id, unique: id}
      - {name: cheap, between: {price: [1, 900]}, blocking: true}
      - {name: counted, when: "{{ output.row_count == 600 and output.rows | length == 600 }}"}
    next: [each]
  - step: each
    loop: {in: "{{ start.rows }}", iterator: row, spec: {mode: parallel, max_in_flight: 50}}
    tool: {kind: noop, result: "{{ row.id }}"}
    next: [pairs]
  - step: pairs
    loop: {in: "{{ start }}", iterator: pair}
    tool: {kind: noop, result: "{{ pair.key }}"}
    next: [code]
  - step: code
    tool: {kind: python, input: {rows: "{{ start.rows }}", big: "{{ start }}"}, code: "result = [sum(row['id'] for row in rows), len(big['rows']), context['start']['row_count'], len(context['start']['rows'])]"}
    next: [duck]
  - step: duck
    tool: {kind: duckdb, input: {load: "{{ start.rows }}", again: "{{ start }}"}, command: "select sum(load.id) as n, count(*) as c from load join again using (id)"}
    next: [stored]
  - step: stored
    tool: {kind: artifact, action: get, step: start}
    next: [end]
  - step: end
    tool: {kind: noop, result: ["{{ each.total }}", "{{ pairs.data | sort }}", "{{ code }}", "{{ duck.rows }}",
           "{{ stored.rows[599].name }}", "{{ start['rows.1.name'] }}", "{{ start.row_count }}"]}
"""


@pytest.mark.parametrize("chunk_bytes", [1024, 8 * 1024**2])
async def test_playbook_gives_the_same_over_many_rows_as_over_few(settings: Settings, chunk_bytes: int) -> None:
    own = {"chunk_bytes": chunk_bytes, "loop_collection_threshold": 500}
    engine = await Engine.open(settings.model_copy(update=own))
    try:
        state = await engine.run(playbook(TEXT), {})
        assert state.status is ExecutionStatus.COMPLETED, state.error
        first: Any = state.latest["start"].envelope["ref"]
        assert ("around" in first.extra) == (chunk_bytes == 1024)
        assert all(one.passed for one in state.checks_of("start", 1)), state.checks_of("start", 1)
        found = state.latest["end"].envelope["data"]
    finally:
        await engine.close()
    assert found == [600, ["columns", "command_0", "row_count", "rows"], [180300, 600, 600, 600],
                     [{"n": 180300, "c": 600}], "name 600", "name 2", 600]  # fmt: skip
