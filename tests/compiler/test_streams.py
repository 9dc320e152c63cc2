"""Steps of a stream in Dagster: one op, an asset and a line of the run's log for each of them."""

from __future__ import annotations

from collections.abc import Callable

from dagster import AssetKey, DagsterInstance

from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook

from .conftest import DagsterRunResult

Launch = Callable[..., DagsterRunResult]

STREAM = """
workload: {pages: 7}
workflow:
  - step: start
    loop: {in: "{{ range(pages) | list }}", iterator: page, spec: {mode: sequential}}
    tool: {kind: python, input: {page: "{{ page }}"}, code: "result = [page, page + 1]"}
    next: {arcs: [{step: double, on: call.partial}, {step: end}]}
  - step: double
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = [2 * row for row in rows]"}
    next: {arcs: [{step: load, on: call.partial}]}
  - step: load
    tool: {kind: python, input: {rows: "{{ chunk.rows }}"}, code: "result = sum(rows)"}
    next: [end]
  - step: end
    tool: {kind: python, input: {sums: "{{ load.results }}"}, code: "result = sum(sums)"}
"""


def test_a_stream_is_one_op_with_an_asset_a_step(launch: Launch, dagster_instance: DagsterInstance) -> None:
    run = launch(STREAM)
    assert run.result.success
    assert run.state.status is ExecutionStatus.COMPLETED, run.state.error
    assert run.state.latest["end"].envelope["data"] == 2 * (2 * 21 + 7)
    made = {event.asset_key.path[-1] for event in run.result.get_asset_materialization_events()}
    assert made == {"start", "double", "load", "end"}
    ops = {event.step_key for event in run.result.all_events if event.is_step_success}
    assert ops == {"sample_playbook.region_start", "sample_playbook.end"}
    said = [entry.user_message for entry in dagster_instance.all_logs(run.result.run_id)]
    last = "start: made 7 chunks, 14 rows; double: took 7, made 7 chunks, 14 rows; load: took 7"
    assert any(last in line for line in said), said


def test_lineage_goes_along_the_stream(noetl: EngineProvider) -> None:
    text = STREAM.replace("workflow:", "workflow:\n  - {step: begin, tool: {kind: noop}, next: [start]}")
    graph = definitions_of([playbook(text.replace("step: begin", "step: first"))], noetl).resolve_asset_graph()
    parents = {key.path[-1]: {one.path[-1] for one in graph.get(key).parent_keys} for key in graph.get_all_asset_keys()}
    assert parents["double"] == {"start"}
    assert parents["load"] == {"double"}
    assert parents["end"] == {"start", "load"}
    assert AssetKey(["tests", "sample", "double"]) in graph.get_all_asset_keys()
