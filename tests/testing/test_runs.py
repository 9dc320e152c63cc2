"""Playbooks with the tools of some steps replaced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.testing import run_playbook
from noetl_dagster.tools.base import ToolCall, ToolResult
from tests.playbooks import playbook

CLINIC = playbook("""
workload: {day: monday}
workflow:
  - step: fetch
    tool: {kind: http, url: "https://clinic.example/{{ day }}", retry: {max_attempts: 3, initial_delay: 0}}
    set: {ctx.count: "{{ output | length }}"}
    checks: [{name: some, when: "{{ output | length > 0 }}"}]
    next:
      spec: {mode: exclusive}
      arcs:
        - {step: alert, when: "{{ event.name == 'step.failed' }}"}
        - {step: none, when: "{{ fetch | length == 0 }}"}
        - {step: visits}
  - step: visits
    loop: {in: "{{ fetch }}", iterator: patient}
    tool: {kind: postgres, auth: clinic, command: "SELECT {{ patient.id }} AS id", output: "{{ output.rows }}"}
    next: [store]
  - step: store
    spec: {dispatch: workers, pool: large}
    tool: {kind: python, input: {visits: "{{ visits.results }}"}, code: "result = {'stored': len(visits)}"}
  - {step: none, tool: {kind: noop}}
  - {step: alert, tool: {kind: http, url: "https://mail.example"}}
""")


def test_values_take_the_places_of_results() -> None:
    run = run_playbook(
        CLINIC,
        mocks={
            "fetch": [{"id": 1}, {"id": 2}],
            "visits": lambda call: {"rows": [{"id": call.scope["patient"]["id"], "auth": call.auth}]},
        },
    )
    assert (run.status, run.error) == (ExecutionStatus.COMPLETED, None)
    assert run.trail == ("fetch", "visits", "store")
    assert run.results["visits"] == [[{"id": 1, "auth": "clinic"}], [{"id": 2, "auth": "clinic"}]]
    assert run.results["store"] == {"stored": 2}, "a step of a pool needs no worker"
    assert run.checks == {"fetch.some": True}
    assert run.ctx == {"count": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.error = ""  # type: ignore[misc]


def test_routing_follows_the_mocked_result() -> None:
    run = run_playbook(CLINIC, mocks={"fetch": []})
    assert run.trail == ("fetch", "none")
    assert run.checks == {"fetch.some": False}


def test_a_mocked_error_is_handled_by_an_arc() -> None:
    run = run_playbook(CLINIC, mocks={"fetch": ToolError("503", kind="connection"), "alert": "sent"})
    assert run.trail == ("fetch", "alert")
    assert run.errors == {"fetch": "step fetch: 503"}
    assert run.status is ExecutionStatus.COMPLETED


def test_a_function_sees_the_call_and_fails_as_often_as_it_likes() -> None:
    asked: list[str] = []

    async def fetch(call: ToolCall) -> Any:
        asked.append(call.config["url"])
        if len(asked) < 3:
            raise ToolError("busy", kind="rate_limit", retryable=True)
        return ToolResult(data=[], details={"http": {"status": 200}})

    run = run_playbook(CLINIC, {"day": "sunday"}, mocks={"fetch": fetch})
    assert asked == ["https://clinic.example/sunday"] * 3
    assert run.trail == ("fetch", "none")


PIPELINE = playbook("""
workflow:
  - step: load
    tool:
      - {name: read, kind: s3, operation: get, bucket: b, key: k}
      - {name: clean, kind: python, input: {text: "{{ read }}"}, code: "result = text.strip()"}
  - step: route
""")


def test_a_task_of_several_is_mocked_by_its_own_name() -> None:
    assert run_playbook(PIPELINE, mocks={"load.read": " a "}).results["load"] == "a"


def test_an_exception_of_python_fails_the_step_with_its_name() -> None:
    run = run_playbook(PIPELINE, mocks={"load.read": ValueError("no such day")})
    assert run.status is ExecutionStatus.FAILED
    assert run.error is not None
    assert "ValueError: no such day" in run.errors["load"]
    assert not run.results


@pytest.mark.parametrize(
    ("sample", "name", "said"),
    [
        (CLINIC, "fetc", "playbook sample has no step 'fetc'; did you mean 'fetch'"),
        (PIPELINE, "load", "has several tasks; mock load.read, load.clean"),
        (PIPELINE, "route", "'route' of playbook sample has no tool"),
    ],
)
def test_a_name_that_the_playbook_does_not_have_is_refused(sample: Playbook, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_playbook(sample, mocks={name: 1})


def test_a_child_playbook_keeps_its_own_tools(tmp_path: Any) -> None:
    """Its step has the name of a mocked one."""
    head = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: NAME, path: tests/NAME}\nworkflow:\n"
    work = "  - {step: work, tool: {kind: python, code: 'result = 1'}, NEXT}\n"
    (tmp_path / "child.yaml").write_text(head.replace("NAME", "child") + work.replace(", NEXT", ""))
    call = "  - {step: call, tool: {kind: playbook, path: child.yaml}}\n"
    (tmp_path / "parent.yaml").write_text(
        head.replace("NAME", "parent") + work.replace("NEXT", "next: [{step: call}]") + call
    )
    run = run_playbook(tmp_path / "parent.yaml", mocks={"work": 2})
    assert (run.results["work"], run.results["call"]) == (2, 1)


def test_a_mocked_spark_step_starts_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noetl_dagster.engine.executions.spark_ahead.start_ahead", lambda *_, **__: 1 / 0)
    sample = playbook("""
    workflow:
      - {step: heavy, tool: {kind: spark, code: "result = spark.range(3)"}, next: [many]}
      - step: many
        loop: {in: [1, 2], iterator: n}
        spec: {loop_mode: fanout, fanout: {engine: spark}}
        tool: {kind: python, code: "result = 1 / 0"}
    """)
    run = run_playbook(sample, mocks={"heavy": {"rows": 3}, "many": lambda call: call.scope["n"]})
    assert run.results == {"heavy": {"rows": 3}, "many": [1, 2]}
