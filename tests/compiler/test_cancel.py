"""Cancelling an execution ends the Dagster run that drives it."""

from __future__ import annotations

import threading
import time

from dagster import DagsterInstance, DagsterRunStatus

from noetl_dagster.events.queries import EXECUTIONS
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider

from .test_jobs import Launch

SLOW = """
workflow:
  - {step: start, tool: {kind: shell, command: "sleep 600"}, next: [after]}
  - {step: after, tool: {kind: noop}}
"""


def test_cancel_ends_the_run_at_once(launch: Launch, noetl: EngineProvider, dagster_instance: DagsterInstance) -> None:
    pool = noetl.engine().runtime.pool

    def cancel_soon() -> None:
        while not run_sync(pool.fetch("SELECT 1 FROM noetl.event WHERE event_type = 'command.claimed'")):
            time.sleep(0.05)
        [row] = run_sync(pool.fetch(EXECUTIONS, 0, 1))
        run_sync(noetl.engine().lifecycle.cancel(row["execution_id"], "enough"))

    canceller = threading.Thread(target=cancel_soon)
    canceller.start()
    run = launch(SLOW)  # ends long before the command would
    canceller.join()
    assert run.state.status is ExecutionStatus.CANCELLED
    assert "after" not in run.state.visits
    ended = dagster_instance.get_run_by_id(run.result.run_id)
    assert ended is not None
    assert ended.status is DagsterRunStatus.CANCELED
