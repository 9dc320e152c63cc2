"""Steps joined by ``on: call.partial``: each chunk once, in order, while it is made."""

from __future__ import annotations

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from tests.engine.conftest import Run

CHUNKS = """
SELECT node_name, (meta ->> 'chunk_index')::int AS chunk, meta ->> 'row_count' AS rows, result
FROM noetl.event WHERE execution_id = $1 AND event_type = 'call.partial' ORDER BY event_id
"""

CHAIN = """
workload: {pages: 5}
workflow:
  - step: start
    loop: {in: "{{ range(pages) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page * 10 + n for n in range(3)]"}
    next: {arcs: [{step: double, on: call.partial}, {step: end}]}
  - step: double
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = [2 * row for row in rows]"}
    next: {arcs: [{step: load, on: call.partial}, {step: after}]}
  - step: load
    loop: {iterator: page}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page['chunk_index'], sum(page['rows'])]"}
    next: [last]
  - step: after
    tool: {kind: python, input: {all: "{{ double.results }}"}, code: "result = len(all)"}
  - step: last
    tool: {kind: python, input: {all: "{{ load.results }}"}, code: "result = all"}
  - step: end
    tool: {kind: python, input: {all: "{{ start.results }}"}, code: "result = len(all)"}
"""


async def test_a_chain_takes_each_chunk_once_and_in_order(engine: Engine, run: Run) -> None:
    state = await run(CHAIN)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["last"].envelope["data"] == [[n, 60 * n + 6] for n in range(5)]
    assert (state.latest["end"].envelope["data"], state.latest["after"].envelope["data"]) == (5, 5)
    pool = engine.runtime.pool
    told = [(row["node_name"], row["chunk"]) for row in await pool.fetch(CHUNKS, state.execution_id)]
    for step in ("start", "double"):
        assert [chunk for name, chunk in told if name == step] == [0, 1, 2, 3, 4]


async def test_a_tool_that_gives_its_result_at_once_gives_one_chunk(run: Run) -> None:
    state = await run("""
workflow:
  - step: start
    tool: {kind: python, code: "result = {'rows': [{'id': 1}, {'id': 2}], 'note': 'x'}"}
    next: {arcs: [{step: take, on: call.partial}]}
  - step: take
    tool:
      kind: python
      input: {chunk: "{{ chunk }}", rows: "{{ chunk.rows | length }}", note: "{{ chunk.data.note }}"}
      code: "result = [chunk['chunk_index'], chunk['row_count'], chunk['has_more'], rows, note]"
""")
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert [item["data"] for item in state.latest["take"].envelope["results"]] == [[0, 2, False, 2, "x"]]
