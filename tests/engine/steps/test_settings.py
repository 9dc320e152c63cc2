"""Settings of a step that are templates: rendered when it is entered, and the same until it has ended."""

from __future__ import annotations

from typing import Any

from noetl_dagster.engine.engine import Engine
from tests.engine.conftest import Run
from tests.playbooks import playbook

SETTINGS = """
SELECT context -> 'settings' AS settings FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.enter' AND node_name = $2
ORDER BY event_id
"""


async def settings_of(engine: Engine, execution_id: int, step: str) -> list[Any]:
    return [row["settings"] for row in await engine.runtime.pool.fetch(SETTINGS, execution_id, step)]


async def test_a_resumed_execution_uses_what_was_settled_first(engine: Engine) -> None:
    text = """
        workflow:
          - step: each
            loop: {in: [1], spec: {mode: parallel, max_in_flight: "{{ range(1, 90000) | random }}"}}
            tool: {kind: python, code: "raise ValueError('again')"}
        """
    state = await engine.run(playbook(text))
    again = await engine.resume(state.execution_id)
    first, second = await settings_of(engine, state.execution_id, "each")
    assert str(again.status) == "FAILED"
    assert first == second
    assert 1 <= first["loop.spec.max_in_flight"] < 90_000


async def test_each_visit_settles_anew(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workflow:
          - step: start
            tool: {kind: noop}
            set: {ctx.tries: 1}
            next: [turn]
          - step: turn
            tool:
              kind: python
              input: {attempt: "{{ _attempt }}"}
              code: |
                if attempt < 2:
                    raise ValueError("once more")
                result = attempt
              spec:
                policy:
                  rules: [{when: "{{ error is defined }}", then: {do: retry, attempts: "{{ ctx.tries }}", delay: 0}}]
            next:
              arcs:
                - {step: turn, when: "{{ event.name == 'step.failed' }}", set: {ctx.tries: "{{ ctx.tries + 1 }}"}}
        """
    )
    assert str(state.status) == "COMPLETED"
    name = "spec.policy.rule 1.then.attempts"
    assert await settings_of(engine, state.execution_id, "turn") == [{name: 1}, {name: 2}]


async def test_a_workbook_task_has_settings_too(run: Run, engine: Engine) -> None:
    state = await run(
        """
        workbook:
          - name: flaky
            tool:
              kind: python
              input: {attempt: "{{ _attempt }}"}
              code: |
                if attempt < 2:
                    raise ValueError("once more")
                result = attempt
              spec:
                policy:
                  rules: [{when: "{{ error is defined }}", then: {do: retry, attempts: "{{ ctx.tries }}", delay: 0}}]
        workflow:
          - step: start
            tool: {kind: noop}
            set: {ctx.tries: "2"}
            next: [call]
          - step: call
            tool: {kind: workbook, name: flaky}
        """
    )
    assert str(state.status) == "COMPLETED"
    [settings] = await settings_of(engine, state.execution_id, "call")
    assert list(settings.values()) == ["2"]


async def test_a_setting_that_cannot_be_rendered_fails_its_step(run: Run) -> None:
    state = await run(
        """
        workflow:
          - step: each
            loop: {in: [1], spec: {mode: parallel, max_in_flight: "{{ ctx.width }}"}}
            tool: {kind: noop}
        """
    )
    assert str(state.status) == "FAILED"
    assert "step each: loop.spec.max_in_flight cannot be rendered" in (state.error or "")
