"""What cannot be stored fails its own step at once, with its place; no execution stays open, and the next one runs."""

from __future__ import annotations

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from tests.playbooks import playbook

FRAME = "import pandas as pd\n"
ARROW = "import pyarrow as pa\n"

RESULTS = {
    "NUL": (r'result = {"rows": [{"x": "a\0b"}]}', "start.task_0: result.rows[0].x holds a NUL character"),
    "surrogate": (r'result = "x\udce9"', "start.task_0: result holds half of a surrogate pair"),
    "surrogate in a key": (r'result = [{"x\udce9": 1}]', "result[0] holds half of a surrogate pair"),
    "collision": ('result = {1: "a", "1": "b"}', "result has two keys that become '1'"),
    "big integer": ("result = [1, {'n': 2**70}]", "result[1].n is an integer beyond 64 bits"),
    "infinity": ("result = {'x': float('inf')}", "result.x is an infinite number"),
    "complex": ("result = [{'a': 1}, {'a': 1j}]", "result[1].a is of type builtins.complex"),
    "duration": ("import datetime\nresult = datetime.timedelta(99999999, 0, 1)", "result is a duration"),
    "depth": ("result = 1\nfor _ in range(900): result = [result]", "is nested deeper than 200 levels"),
    "cycle": ("result = []\nresult.append(result)", "is nested deeper than 200 levels, or holds itself"),
    "table inside": (FRAME + "result = {'t': pd.DataFrame({'a': [1]})}", "result.t is a table inside a value"),
    "mixed column": (FRAME + "result = pd.DataFrame({'a': [1, 'x']})", "Conversion failed for column a"),
    "equal columns": (FRAME + "result = pd.DataFrame([[1, 2]], columns=['a', 'a'])", "Duplicate column names"),
    "empty struct": (ARROW + "result = pa.table({'a': [{}]})", "Cannot write struct type 'a'"),
}
"""Code and the beginning of the message about its result."""

RAISED = {
    "NUL in a message": (r'raise ValueError("a\0b")', "ValueError: a�b"),
    "surrogate in a message": (r'raise ValueError("a\udce9b")', "ValueError: a?b"),
    "CancelledError": ("import asyncio\nraise asyncio.CancelledError()", "CancelledError"),
    "GeneratorExit": ("raise GeneratorExit('no')", "GeneratorExit: no"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "group": (
        "import asyncio\nraise BaseExceptionGroup('all', [asyncio.CancelledError(), ValueError('x')])",
        "BaseExceptionGroup: all (2 sub-exceptions)",
    ),
    "own class": ("class Odd(BaseException): pass\nraise Odd('no')", "Odd: no"),
    "async": ("import asyncio\nasync def main():\n    raise asyncio.CancelledError()", "CancelledError"),
    "generator": ("def main():\n    yield {'a': 1}\n    raise GeneratorExit('no')", "GeneratorExit: no"),
    "async generator": (
        "import asyncio\nasync def main():\n    yield {'a': 1}\n    raise asyncio.CancelledError('no')",
        "CancelledError: no",
    ),
}
"""Code and the beginning of the message about what it raises."""

WRITTEN = {
    "set": ("set: {ctx.a: '{{ 2 ** 70 }}'}", "ctx.a is an integer beyond 64 bits"),
    "deep set": ("set: {ctx.a: '{{ start.deep }}', ctx.b: '{{ [[start.deep]] }}'}", "is nested deeper than 200 levels"),
    "output": ("output: {a: [1, '{{ 2 ** 70 }}']}", "output.a[1] is an integer beyond 64 bits"),
    "arc": ("next: [{step: end, set: {x: '{{ 2 ** 70 }}'}}]", "ctx.x is an integer beyond 64 bits"),
}
"""Parts of a step and the beginning of the message about them."""

HELLO = "workflow:\n- step: start\n  tool: {kind: python, code: result = 1}\n"


async def fails(engine: Engine, text: str, message: str) -> None:
    state = await engine.run(playbook(text))
    assert state.status is ExecutionStatus.FAILED
    assert message in (state.error or ""), state.error
    assert (await engine.run(playbook(HELLO))).status is ExecutionStatus.COMPLETED


@pytest.mark.parametrize(("code", "message"), [*RESULTS.values(), *RAISED.values()], ids=[*RESULTS, *RAISED])
async def test_code_that_ends_in_an_odd_way_fails_its_step(engine: Engine, code: str, message: str) -> None:
    lines = "\n".join(f"      {line}" for line in code.splitlines())
    await fails(engine, f"workflow:\n- step: start\n  tool:\n    kind: python\n    code: |\n{lines}\n", message)


@pytest.mark.parametrize("code", [RESULTS["collision"], RESULTS["mixed column"], RAISED["CancelledError"]])
async def test_a_subprocess_says_the_same(engine: Engine, code: tuple[str, str]) -> None:
    lines = "\n".join(f"      {line}" for line in code[0].splitlines())
    text = f"workflow:\n- step: start\n  tool:\n    kind: python\n    isolation: subprocess\n    code: |\n{lines}\n"
    await fails(engine, text, code[1])


@pytest.mark.parametrize(("part", "message"), WRITTEN.values(), ids=WRITTEN)
async def test_what_a_step_writes_is_admitted(engine: Engine, part: str, message: str) -> None:
    await fails(
        engine,
        "workflow:\n- step: start\n  tool:\n    kind: python\n    code: |\n      deep = 1\n"
        f"      for _ in range(199): deep = [deep]\n      result = {{'deep': deep}}\n  {part}\n"
        "- step: end\n  tool: {kind: noop}\n",
        message,
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("loop: {in: '{{ [1, 2 ** 70] }}', iterator: n}\n  tool: {kind: noop}", "step start: loop.in[1]"),
        ("tool: {kind: noop, result: {n: ['{{ 2 ** 70 }}']}}", "start.task_0: result.n[0]"),
        ("tool: {kind: noop, output: {n: '{{ 2 ** 70 }}'}}", "start.task_0: output.n"),
        ("tool: {kind: noop, set: {ctx.n: '{{ 2 ** 70 }}'}}", "ctx.n"),
        ("tool: {kind: playbook, path: tests/values/child, input: {all: '{{ [2 ** 70] }}'}}", "workload.all[0]"),
    ],
)
async def test_other_places_are_named(engine: Engine, part: str, message: str) -> None:
    await fails(engine, f"workflow:\n- step: start\n  {part}\n", f"{message} is an integer beyond 64 bits")
