"""Two executions beside each other: what differs in their input and their steps."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.comparing import (
    MOST_VALUES,
    Comparison,
    changed_values,
    compare,
)
from noetl_dagster.errors import ExecutionNotFoundError
from tests.playbooks import playbook


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
        return await compare(engine.runtime, left, right)

    few, many, slow = await made(), await made(limit=6), await made(mode={"fast": False})

    found = await compared(few, many)
    assert found.changed == (("limit", "3", "6"),)
    assert found.difference == "Step start has other numbers of visits or iterations in the right execution."
    assert [(one.step, one.is_alike) for one in found.steps] == [
        ("start", False),
        ("check", True),
        ("end", False),
        ("report", False),
    ]
    start, _, end, _ = found.steps
    assert start.left is not None
    assert start.right is not None
    assert start.left.loop is not None
    assert start.right.loop is not None
    assert (start.left.loop.total, start.left.loop.done, start.right.loop.total) == (3, 3, 6)
    assert found.left.seconds["start"] > 0
    assert end.right is None
    assert found.left.reference == "tests/load"

    found = await compared(few, slow)
    assert found.changed == (("mode.fast", "true", "false"),)
    assert found.difference.startswith("Step check completed in the left execution, and failed (")
    assert "too <b>slow</b>" in found.difference
    assert found.right.overview.status == "FAILED"
    assert found.steps[1].right is not None
    assert "slow" in str(found.steps[1].right.error)

    same = await compared(few, few)
    assert (same.changed, same.more) == ((), 0)
    assert same.difference == "All steps ended alike."

    wide = await made(values={str(number): number for number in range(MOST_VALUES + 10)})
    found = await compared(few, wide)
    assert (len(found.changed), found.more) == (MOST_VALUES, 10)
    huge = await made(values={"long": ["x" * 1_000] * 2_000})
    found = await compared(few, huge)
    assert found.changed is None
    with pytest.raises(ExecutionNotFoundError):
        await compared(few, 12)
