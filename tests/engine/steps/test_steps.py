"""Steps, routing and context: what the language means at run time."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.state import ExecutionStatus
from tests.engine.conftest import Run


async def test_an_unhandled_failure_fails_the_execution(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: python, code: "raise ValueError('no luck')"}
            next: [end]
          - step: end
            tool: {kind: noop}
        """
    )
    assert state.status is ExecutionStatus.FAILED
    assert state.error is not None
    assert "start" in state.error
    assert "no luck" in state.error
    assert "end" not in state.latest


async def test_an_undecidable_arc_is_an_error_not_an_end(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: python, code: "result = {'n': 1}"}
            next:
              arcs: [{step: end, when: "{{ start.m > 3 }}"}]
          - step: end
            tool: {kind: noop}
        """
    )
    assert state.status is ExecutionStatus.FAILED
    assert state.error is not None
    assert "m" in state.error


async def test_a_large_result_is_stored_and_read_on_first_use(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: python, code: "result = {'rows': [{'n': n} for n in range(5000)]}"}
            next: [end]
          - step: end
            tool: {kind: python, input: {rows: "{{ start.rows }}"}, code: "result = len(rows)"}
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["start"].envelope["ref"].bytes_size > 8192
    assert state.latest["end"].envelope["data"] == 5000


async def test_a_setting_that_the_workload_makes_impossible_starts_nothing(run: Run, engine: Engine) -> None:
    text = """
        workload: {width: "2"}
        workflow:
          - step: start
            loop: {in: [1], iterator: n, spec: {mode: parallel, max_in_flight: "{{ width }}"}}
            tool: {kind: noop}
        """
    with pytest.raises(PlaybookError, match="max_in_flight must be a number"):
        await run(text, width="many")
    assert await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.event") == 0
