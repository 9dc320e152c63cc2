"""Dagster's own "re-execute from failure" goes on with the same execution; a full one starts another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRun, JobDefinition
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import create_execution_plan, execute_run
from dagster._core.execution.plan.state import KnownExecutionState

from noetl_dagster.compiler import runs
from noetl_dagster.compiler.plan import plan_playbook
from noetl_dagster.compiler.runs import EXECUTION_TAG, attach, execution_tags
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.worker.execution import Execution
from tests.definitions import definitions_of
from tests.playbooks import playbook

FLAKY = """
workload: {proof: ""}
workflow:
  - {step: start, tool: {kind: python, code: "result = list(range(8))"}, next: [work]}
  - step: work
    loop: {in: "{{ start.data }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 2, max_shard_retries: 0}}
    tool:
      kind: python
      input: {n: "{{ n }}", proof: "{{ proof }}"}
      code: |
        import os
        if n == 5 and not os.path.exists(proof):
            raise RuntimeError("not yet")
        result = n
    next: [end]
  - {step: end, tool: {kind: python, input: {items: "{{ work.results }}"}, code: "result = sum(items)"}}
"""


def test_reexecution_from_failure_continues_the_execution(
    noetl: EngineProvider, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    job = job_of(noetl)
    config = {"ops": {"sample_playbook": {"config": {"proof": str(proof)}}}}
    first = job.execute_in_process(run_config=config, instance=dagster_instance, raise_on_error=False)
    assert not first.success
    failed = dagster_instance.get_run_by_id(first.run_id)
    assert failed is not None
    before = state_of(noetl, dagster_instance, failed.run_id)
    assert before.status is ExecutionStatus.FAILED
    assert "not yet" in (before.error or "")

    proof.touch()
    again = from_failure(job, dagster_instance, failed)

    after = state_of(noetl, dagster_instance, again.run_id)
    assert after.execution_id == before.execution_id
    assert after.status is ExecutionStatus.COMPLETED, after.error
    assert after.epoch == 2
    assert after.latest["end"].envelope["data"] == 28
    counts = run_sync(commands_of(noetl, after.execution_id))
    assert counts["start"] == 1, "a step that had ended did not run again"
    assert counts["work"] == 9, "eight shards, and the failed one once more"


def test_ops_that_start_at_once_open_one_epoch(
    noetl: EngineProvider, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All find the epoch of the run before, and only then one after the other comes to open the next."""
    definition = playbook(FLAKY)
    engine = noetl.engine()
    execution = run_sync(engine.lifecycle.create(definition, origin={"dagster_run_id": "before"}))
    tags = execution_tags(execution.id, "before")
    run = dagster_instance.create_run_for_job(job_def=job_of(noetl), tags={**tags, "dagster/is_resume_retry": "true"})
    resume, ops = engine.lifecycle.resume, 4

    async def start_at_once() -> list[Execution]:
        found, turn = asyncio.Barrier(ops), asyncio.Lock()

        async def late(*given: Any, **named: Any) -> Execution:
            await found.wait()
            async with turn:
                return await resume(*given, **named)

        monkeypatch.setattr(engine.lifecycle, "resume", late)
        plan = plan_playbook(definition)
        attached = (attach(engine, dagster_instance, run, plan, plan.regions[-1], None) for _ in range(ops))
        return await asyncio.gather(*attached)

    assert [one.state.epoch for one in run_sync(start_at_once())] == [2] * ops
    assert run_sync(engine.runtime.load(execution.id)).state.epoch == 2


BRANCHES = """
workflow:
  - step: start
    tool: {kind: python, code: "result = 1"}
    next: {spec: {mode: inclusive}, arcs: [{step: left}, {step: right}]}
  - step: left
    tool: {kind: python, input: {n: "{{ start.data }}"}, code: "result = n + 1"}
    next: [joined]
  - step: right
    tool: {kind: python, input: {n: "{{ start.data }}"}, code: "result = n + 2"}
    next: [joined]
  - step: joined
    tool: {kind: python, input: {n: "{{ left.data + right.data }}"}, code: "result = n"}
    next: [last]
  - step: last
    tool: {kind: python, input: {n: "{{ joined.data }}"}, code: "result = n"}
"""


def test_an_op_reads_again_unless_the_one_before_it_has_read_all(
    noetl: EngineProvider, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plan = noetl.engine(), plan_playbook(playbook(BRANCHES))
    run = DagsterRun(job_name="branches", run_id="11111111-1111-4111-8111-111111111111")
    execution = run_sync(engine.lifecycle.create(plan.playbook, origin={"dagster_run_id": run.run_id}))
    regions = {region.op: region for region in plan.regions}

    def handed_on(before: str, after: str) -> bool:
        run_sync(runs.finish(engine, run, plan, regions[before], execution.id))
        return runs.driven_run(run, plan).take(plan, regions[after]) is not None

    pairs = [("start", "left"), ("start", "joined"), ("left", "joined"), ("joined", "last"), ("last", "start")]
    assert [handed_on(*pair) for pair in pairs] == [True, False, False, True, False]
    run_sync(runs.finish(engine, run, plan, regions["start"], execution.id))
    taken = [runs.driven_run(run, plan).take(plan, regions["left"]) is not None for _ in range(2)]
    assert taken == [True, False]  # two ops would change the same state
    monkeypatch.setattr(runs, "FRESH_SECONDS", 0.0)
    assert not handed_on("start", "left")


def test_a_full_reexecution_is_an_execution_of_its_own(
    noetl: EngineProvider, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    (tmp_path / "proof").touch()
    job = job_of(noetl)
    config = {"ops": {"sample_playbook": {"config": {"proof": str(tmp_path / "proof")}}}}
    first = job.execute_in_process(run_config=config, instance=dagster_instance)
    run = dagster_instance.get_run_by_id(first.run_id)
    assert run is not None
    again = dagster_instance.create_run_for_job(
        job_def=job, run_config=config, tags=run.tags, parent_run_id=run.run_id, root_run_id=run.run_id
    )
    execute_run(InMemoryJob(job), again, dagster_instance, raise_on_error=True)
    assert (
        state_of(noetl, dagster_instance, again.run_id).execution_id
        != state_of(noetl, dagster_instance, run.run_id).execution_id
    )


def job_of(noetl: EngineProvider) -> JobDefinition:
    return definitions_of([playbook(FLAKY)], noetl).resolve_job_def("sample")


def from_failure(job: JobDefinition, instance: DagsterInstance, failed: DagsterRun) -> DagsterRun:
    """What the UI's button does."""
    steps, known = KnownExecutionState.build_resume_retry_reexecution(instance, failed)
    plan = create_execution_plan(InMemoryJob(job), failed.run_config, step_keys_to_execute=steps, known_state=known)
    run = instance.create_run_for_job(
        job_def=job,
        execution_plan=plan,
        run_config=failed.run_config,
        tags={**failed.tags, "dagster/is_resume_retry": "true"},
        parent_run_id=failed.run_id,
        root_run_id=failed.run_id,
    )
    execute_run(InMemoryJob(job), run, instance, raise_on_error=True)
    return run


def state_of(noetl: EngineProvider, instance: DagsterInstance, run_id: str) -> ExecutionState:
    """What the log says about the execution that a run drove; its tag is written while it runs."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run_sync(noetl.engine().runtime.load(int(run.tags[EXECUTION_TAG]))).state


async def commands_of(noetl: EngineProvider, execution_id: int) -> dict[str, int]:
    rows = await noetl.engine().runtime.pool.fetch(
        "SELECT node_name, count(*) FROM noetl.event "
        "WHERE execution_id = $1 AND event_type = 'command.claimed' GROUP BY 1",
        execution_id,
    )
    return {row["node_name"]: row["count"] for row in rows}
