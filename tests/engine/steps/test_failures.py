"""What the log keeps of a command that failed."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from noetl_dagster.worker import pipeline
from noetl_dagster.worker.command import Command, Outcome
from tests.engine.conftest import Run
from tests.playbooks import playbook


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


async def test_the_sink_of_a_command_that_another_worker_ended_is_rolled_back(
    settings: Settings,
) -> None:
    engine = await Engine.open(settings.model_copy(update={"default_postgres_credential": "embedded"}))
    pool = engine.runtime.pool
    await pool.execute("CREATE TABLE kept (n int)")
    text = """
        workflow:
          - step: start
            tool:
              kind: python
              code: "result = {'n': 1}"
              sink: {tool: postgres, table: kept, auth: pg_local}
        """
    execution = await engine.lifecycle.create(playbook(text))
    commands = engine.runtime.commands
    ended = commands.ended(Command(execution.id, "start"), Outcome({"status": "ok", "data": {"n": 2}}))
    await engine.runtime.log.append([ended])
    await engine.walker.run(execution)
    assert await pool.fetchval("SELECT count(*) FROM kept") == 0
    query = "SELECT count(*) FROM noetl.event WHERE event_type IN ('command.completed', 'command.failed')"
    assert await pool.fetchval(query) == 1
    await engine.close()


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
