"""Steps, routing and context: what the language means at run time."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events.state import ExecutionStatus
from tests.engine.conftest import Run


async def test_exclusive_arcs_fire_once_and_inclusive_ones_join(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: python, code: "result = {'n': 3}"}
            next:
              spec: {mode: inclusive}
              arcs:
                - {step: left, when: "{{ start.n > 1 }}", set: {ctx.side: left}}
                - {step: right, when: "{{ start.n > 2 }}"}
                - {step: never, when: "{{ start.n > 9 }}"}
          - step: left
            tool: {kind: python, code: "result = 1"}
            next: [join]
          - step: right
            tool: {kind: python, code: "result = 2"}
            next: [join]
          - step: never
            tool: {kind: noop}
            next: [join]
          - step: join
            tool:
              kind: python
              input: {a: "{{ left.data }}", b: "{{ right.data }}", side: "{{ ctx.side }}"}
              code: "result = [a + b, side]"
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["join"].envelope["data"] == [3, "left"]
    assert "never" not in state.latest
    assert state.visits["join"] == 1


async def test_a_cycle_visits_its_steps_again(run: Run) -> None:
    state = await run(
        """
        workload: {pages: 4}
        workflow:
          - step: start
            tool: {kind: noop}
            set: {ctx.page: 1, ctx.seen: []}
            next: [fetch]
          - step: fetch
            tool: {kind: python, input: {page: "{{ ctx.page }}"}, code: "result = {'page': page}"}
            set: {ctx.seen: "{{ ctx.seen + [fetch.page] }}"}
            next:
              arcs:
                - {step: fetch, when: "{{ fetch.page < pages }}", set: {ctx.page: "{{ ctx.page + 1 }}"}}
                - {step: end}
          - step: end
            tool: {kind: python, input: {seen: "{{ ctx.seen }}"}, code: "result = seen"}
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == [1, 2, 3, 4]
    assert state.visits["fetch"] == 4


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


async def test_policies_retry_jump_and_break(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool:
              - name: flaky
                kind: python
                input: {attempt: "{{ _attempt }}"}
                code: |
                  if attempt < 3:
                      raise RuntimeError("not yet")
                  result = {"attempt": attempt}
                spec:
                  policy:
                    rules:
                      - when: "{{ output.status == 'error' }}"
                        then: {do: retry, attempts: 5, delay: 0.01}
              - name: count
                kind: noop
                set: {ctx.n: "{{ ctx.n | default(0) + 1 }}"}
                spec:
                  policy:
                    rules:
                      - when: "{{ ctx.n < 3 }}"
                        then: {do: jump, to: count}
                      - else: {then: {do: break}}
              - name: never
                kind: python
                code: "raise RuntimeError('not reached')"
        """
    )
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.ctx["n"] == 3
    assert state.latest["start"].envelope["results"]["flaky"]["data"] == {"attempt": 3}


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
        workload: {width: 2}
        workflow:
          - step: start
            loop: {in: [1], iterator: n, spec: {mode: parallel, max_in_flight: "{{ width }}"}}
            tool: {kind: noop}
        """
    with pytest.raises(PlaybookError, match="max_in_flight must be a number"):
        await run(text, width="many")
    assert await engine.runtime.pool.fetchval("SELECT count(*) FROM noetl.event") == 0
