"""Reports of executions that no Dagster run drives: each materialization reaches Dagster once."""

from __future__ import annotations

from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.compiler.reporting import DagsterReporter
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import EndPosition, ended_outside
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution
from tests.playbooks import playbook

TWO = """
workflow:
  - step: start
    tool: {kind: python, code: "result = [{'n': 1}]"}
    checks: [{row_count: 1, name: one}]
    next: [finish]
  - {step: finish, tool: {kind: python, code: "result = 'small'"}}
"""


async def driven(engine: Engine) -> Execution:
    """Returns an execution that this process has driven to its end, and still holds."""
    execution = await engine.lifecycle.create(playbook(TWO))
    await engine.drive(execution, release=False)
    return await engine.runtime.load(execution.id)


def count(instance: DagsterInstance, step: str) -> int:
    return len(instance.fetch_materializations(AssetKey(["tests", "sample", step]), limit=10).records)


@pytest.mark.parametrize("lost", [True, False])
def test_a_driver_that_lost_its_liveness_looks_for_the_report_of_another(
    noetl: EngineProvider, dagster_instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    engine = noetl.engine()
    execution = run_sync(driven(engine))
    assert run_sync(engine.liveness.has_held([execution.id]))
    reporter = DagsterReporter(engine, dagster_instance)

    def killed(*_: Any) -> None:
        raise SystemError

    with monkeypatch.context() as patch:
        patch.setattr(DagsterReporter, "_record", killed)  # another process has written all but the record
        with pytest.raises(SystemError):
            run_sync(DagsterReporter(engine, dagster_instance).report([execution]))
    if lost:
        engine.liveness._connection.terminate()
    run_sync(reporter.report([execution], fresh=True))
    # the second case shows that an uninterrupted driver does not search: no other process can have reported
    assert [count(dagster_instance, step) for step in ("start", "finish")] == [1 if lost else 2] * 2


async def test_an_execution_that_was_not_held_all_the_time(settings: Settings) -> None:
    engine = await Engine.open(settings)
    liveness: Liveness = engine.liveness
    await liveness.hold(1)
    await liveness.hold(2)
    assert await liveness.has_held([1, 2])
    assert not await liveness.has_held([1, 3])
    await engine.runtime.pool.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1"
    )
    assert not await liveness.has_held([1])
    await liveness.hold(3)  # with a connection that holds the others again
    assert not await liveness.has_held([1])
    assert await liveness.has_held([3])
    await liveness.release(1)
    await liveness.hold(1)
    assert await liveness.has_held([1, 3])
    await engine.close()


async def test_ends_are_read_in_the_order_of_their_transactions(settings: Settings) -> None:
    """Transaction 9 precedes transaction 10."""
    engine = await Engine.open(settings)
    runtime, found = engine.runtime, []
    first, second = [(await engine.run(playbook(TWO))).execution_id for _ in range(2)]
    for execution_id, transaction in ((first, "9"), (second, "10")):
        await runtime.pool.execute(
            "UPDATE noetl.event SET xact_id = $2::text::xid8 WHERE execution_id = $1", execution_id, transaction
        )
    position = EndPosition()
    for _ in range(2):
        executions, position = await ended_outside(runtime, engine.liveness, position, limit=1)
        found += [one.id for one in executions]
    assert found == [first, second]
    await engine.close()
