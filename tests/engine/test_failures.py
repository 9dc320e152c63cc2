"""What the log keeps of a command that failed."""

from __future__ import annotations

from noetl_dagster.engine.engine import Engine

from .conftest import Run


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
