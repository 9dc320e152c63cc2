"""Branches of a playbook run at the same time, and the log has each of their events once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dagster import DagsterInstance
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from noetl_dagster.code_location.launch import launch
from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook
from tests.waiting import PATIENCE_SECONDS

MEETING = """
workload: {folder: "", patience: 1}
workflow:
  - step: start
    tool: {kind: noop}
    next: {spec: {mode: inclusive}, arcs: [{step: left}, {step: right}]}
  - step: left
    tool: &meets
      kind: python
      input: {folder: "{{ folder }}", patience: "{{ patience }}", own: "{{ job.id }}-left", other: "{{ job.id }}-right"}
      code: |
        import pathlib, time

        def main(folder, patience, own, other):
            pathlib.Path(folder, own).touch()
            deadline = time.monotonic() + patience
            while not pathlib.Path(folder, other).exists():
                assert time.monotonic() < deadline, "the other branch did not begin"
                time.sleep(0.01)
            return own
    next: [end]
  - step: right
    tool:
      <<: *meets
      input: {folder: "{{ folder }}", patience: "{{ patience }}", own: "{{ job.id }}-right", other: "{{ job.id }}-left"}
    next: [end]
  - step: end
    tool: {kind: noop}
"""

BRANCHES = """
workload: {numbers: [1, 2, 3, 4, 5, 6, 7]}
workflow:
  - step: start
    tool: {kind: noop}
    next: {spec: {mode: inclusive}, arcs: [{step: squares}, {step: cubes}, {step: broken}]}
  - step: squares
    loop: &each {in: "{{ numbers }}", iterator: n}
    spec: &fanout {loop_mode: fanout, fanout: {max_groups: 3}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
    next: [total]
  - step: cubes
    loop: *each
    spec: *fanout
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n ** 3"}
    next: [total]
  - step: broken
    tool: {kind: python, code: "raise ValueError('as it should')"}
    next: [{step: total, when: "{{ event.name == 'step.failed' }}"}]
  - step: total
    tool:
      kind: python
      input: {a: "{{ squares.results }}", b: "{{ cubes.results }}"}
      code: "result = sum(a) + sum(b)"
"""


def test_branches_wait_at_the_same_time(
    noetl: EngineProvider, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    done = launch(
        playbook(MEETING),
        noetl,
        dagster_instance,
        execution_id=noetl.engine().runtime.ids.next(),
        workload={"folder": str(tmp_path), "patience": int(PATIENCE_SECONDS)},
    )
    assert done.success, done.error


def test_the_log_of_branches(noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    job = definitions_of([playbook(BRANCHES)], noetl).resolve_job_def("sample")
    run = dagster_instance.create_run_for_job(job, run_config={"execution": {"config": {"threaded": {}}}})
    assert execute_run(InMemoryJob(job), run, dagster_instance).success
    found = dagster_instance.get_run_by_id(run.run_id)
    assert found is not None
    execution_id = int(found.tags[EXECUTION_TAG])
    events: list[Any] = run_sync(
        noetl.engine().runtime.pool.fetch(
            "SELECT event_type, node_name, current_index FROM noetl.event WHERE execution_id = $1",
            execution_id,
        )
    )
    counted = Counter((row["event_type"], row["node_name"], row["current_index"]) for row in events)
    state = run_sync(noetl.engine().runtime.load(execution_id)).state
    assert state.end_of("total", 1).envelope["data"] == sum(n * n + n**3 for n in range(1, 8))
    for step in ("squares", "cubes"):
        assert [counted["loop.shard.done", step, index] for index in range(7)] == [1] * 7
        assert [counted["command.issued", step, index] for index in range(7)] == [1] * 7
    once = [
        ("playbook.initialized", "sample"), ("playbook.completed", "sample"),
        *((kind, step) for kind in ("step.enter", "step.exit") for step in ("start", "squares", "cubes", "broken", "total")),
        *(("loop.fanin.completed", step) for step in ("squares", "cubes")),
        ("command.failed", "broken"),
    ]  # fmt: skip
    assert [counted[kind, name, None] for kind, name in once] == [1] * len(once)
