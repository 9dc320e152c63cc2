"""Two executions beside each other: what differs in their input, their steps, and first of all in their course."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.comparing import (
    MOST_VALUES,
    ComparedExecution,
    Comparison,
    changed_values,
    compare,
    course_of,
    first_difference,
)
from noetl_dagster.errors import ExecutionNotFoundError
from tests.playbooks import playbook

START = datetime(2026, 1, 1, tzinfo=UTC)


def execution(*events: str, status: str = "COMPLETED", is_whole: bool = True) -> ComparedExecution:
    """An execution whose course is written as ``a`` (entered), ``a:FAILED`` or ``a:COMPLETED>b,c``; ``a#2`` is a visit."""
    rows = []
    for second, text in enumerate(events):
        name, is_end, end = text.partition(":")
        step, _, visit = name.partition("#")
        ended, _, fired = end.partition(">")
        rows.append(
            {
                "event_type": "step.exit" if is_end else "step.enter",
                "step": step,
                "visit": int(visit or 1),
                "status": ended or None,
                "created_at": START + timedelta(seconds=second),
                "fired": fired.split(",") if fired else [],
                "error": "no such table" if ended == "FAILED" else None,
            }
        )
    return ComparedExecution(
        execution_id=1,
        playbook="p",
        path="tests/p",
        version=None,
        status=status,
        started_at=START,
        ended_at=None,
        seconds=0.0,
        error=None,
        workload={},
        steps={},
        course=course_of(rows),
        is_whole=is_whole,
    )


A, B = ("a", "a:COMPLETED>b"), ("b", "b:COMPLETED")


@pytest.mark.parametrize(
    ("left", "right", "sentence"),
    [
        (execution(*A, *B), execution(*A, *B), "Both took the same course: 2 visits of 0 steps, which ended alike."),
        (execution(), execution(), "Neither execution has entered a step."),
        (
            execution(*A, *B),
            execution("a", "a:FAILED", status="FAILED"),
            "Step a completed in the left execution, and failed (no such table) in the right one.",
        ),
        (
            execution("a", "a:SKIPPED"),
            execution("a", status="RUNNING"),
            "Step a was skipped in the left execution, and has not ended in the right one.",
        ),
        (
            execution("a", "a:COMPLETED>b,c", *B),
            execution("a", "a:COMPLETED"),
            "After step a completed, the left execution went on to b and c, and the right one to no further step.",
        ),
        (
            execution(*A, *B, "a#2", "a#2:COMPLETED>b"),
            execution(*A, *B, "a#2", "a#2:FAILED>b"),
            "Visit 2 of step a completed in the left execution, and failed (no such table) in the right one.",
        ),
        (
            execution("a", "b", "a:COMPLETED", "b:COMPLETED"),
            execution("b", "b:COMPLETED", "a", "a:COMPLETED"),
            "Both took the same course: 2 visits of 0 steps, which ended alike.",
        ),
        (
            execution(*A, *B),
            execution(*A, status="RUNNING"),
            "Only the left execution entered step b; the right one still runs and has not yet.",
        ),
        (
            execution(*A, status="CANCELLED"),
            execution(*A, *B),
            "Only the right execution entered step b; the left one was cancelled without it.",
        ),
        (
            execution(*A),
            execution(*A, status="CANCELLED"),
            "Both took the same course, but the left execution completed, and the right one was cancelled.",
        ),
        (
            execution(*A, *B),
            execution(*A, is_whole=False),
            "The first 5,000 beginnings and ends of visits do not differ; later ones are not compared.",
        ),
        (
            execution("a", "a:FAILED", "a", "a:COMPLETED>b"),
            execution(*A),
            "Both took the same course: 1 visit of 0 steps, which ended alike.",
        ),
    ],
)
def test_the_first_difference_is_a_sentence(left: ComparedExecution, right: ComparedExecution, sentence: str) -> None:
    assert first_difference(left, right) == sentence


@pytest.mark.parametrize(
    ("left", "right", "changed"),
    [
        ({}, {}, []),
        ({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 2]}, "a": 1}, []),
        ({"a": 1}, {"a": "1"}, [("a", "1", '"1"')]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, [("a.b.c", "1", "2")]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [("a", "[1,2]", "[2,1]")]),
        ({"a": None}, {}, [("a", "null", None)]),
        ({"a": {}}, {"a": {"b": 1}}, [("a.b", None, "1")]),
        ({"a": {}}, {"a": {}}, []),
        ({"a": "x" * 900}, {"a": ""}, [("a", '"' + "x" * 499 + "…", '""')]),
    ],
)
def test_values_that_differ(left: dict[str, Any], right: dict[str, Any], changed: list[Any]) -> None:
    assert list(changed_values(left, right)) == changed


LOAD = """
workload: {limit: 3, mode: {fast: true}, values: {}}
workflow:
  - step: start
    tool: {kind: noop}
    loop: {in: "{{ range(limit) | list }}", iterator: n}
    next: [{step: check}]
  - step: check
    tool: {kind: python, code: "if not fast: raise ValueError('too <b>slow</b>')", input: {fast: "{{ mode.fast }}"}}
    next:
      - {step: end, on: step.done, when: "{{ limit < 5 }}"}
      - {step: report, on: step.done}
  - {step: report, tool: {kind: noop}}
  - {step: end, tool: {kind: noop}}
"""


async def test_executions_of_the_engine(engine: Engine) -> None:
    shape = playbook(LOAD, name="load")

    async def made(**workload: Any) -> int:
        return (await engine.run(shape, workload)).execution_id

    async def compared(left: int, right: int) -> Comparison:
        return await compare(engine.runtime.pool, left, right)

    few, many, slow = await made(), await made(limit=6), await made(mode={"fast": False})

    found = await compared(few, many)
    assert found.changed == (("limit", "3", "6"),)
    assert found.difference == (
        "After step check completed, the left execution went on to end, and the right one to report."
    )
    assert [(one.step, one.is_alike) for one in found.steps] == [
        ("start", False),
        ("check", True),
        ("end", False),
        ("report", False),
    ]
    start, _, end, _ = found.steps
    assert start.left is not None
    assert start.right is not None
    assert (start.left.total, start.left.done, start.right.total) == (3, 3, 6)
    assert start.left.seconds > 0
    assert end.right is None
    assert found.left.reference == "tests/load"

    found = await compared(few, slow)
    assert found.changed == (("mode.fast", "true", "false"),)
    assert found.difference.startswith("Step check completed in the left execution, and failed (")
    assert "too <b>slow</b>" in found.difference
    assert found.right.status == "FAILED"
    assert found.steps[1].right is not None
    assert "slow" in str(found.steps[1].right.error)

    same = await compared(few, few)
    assert (same.changed, same.more) == ((), 0)
    assert same.difference == "Both took the same course: 3 visits of 3 steps, which ended alike."

    wide = await made(values={str(number): number for number in range(MOST_VALUES + 10)})
    found = await compared(few, wide)
    assert (len(found.changed), found.more) == (MOST_VALUES, 10)
    huge = await made(values=["x" * 1_000] * 2_000)
    found = await compared(few, huge)
    assert found.right.workload is None
    assert found.changed == ()
    with pytest.raises(ExecutionNotFoundError):
        await compared(few, 12)
