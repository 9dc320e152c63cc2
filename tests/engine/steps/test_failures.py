"""What the log keeps of a command that failed."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.worker import pipeline
from tests.engine.conftest import Run


async def test_a_failure_says_what_the_command_could_see_and_no_secret(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workload: {api_token: geheim, rows: [1, 2]}
        workflow:
          - step: start
            tool: {kind: python, code: "result = {'n': 'x' * 100}"}
            set: {ctx.page: 3}
            next: [bad]
          - step: bad
            tool: {kind: python, code: "raise ValueError('spilled')"}
        """
    )
    row = await engine.runtime.pool.fetchrow(
        "SELECT context FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.failed'",
        state.execution_id,
    )
    context = row["context"]
    assert context["workload"] == {"api_token": "***", "rows": [1, 2]}
    assert context["vars"] == {"page": 3}
    assert context["_step_results"] == {"start": {"has_data": True, "status": "success", "data_type": "dict"}}


async def test_tasks_that_jump_without_an_end_fail_the_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "JUMP_LIMIT", 20)
    state = await run(
        """
        workflow:
          - step: start
            tool:
              - again: {kind: noop, spec: {policy: {rules: [{else: {then: {do: jump, to: again}}}]}}}
        """
    )
    assert state.status is ExecutionStatus.FAILED
    assert "jumped 20 times without an end" in state.latest["start"].envelope["error"]["message"]
