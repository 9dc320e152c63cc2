"""Drawn values cross what they cross in executions, and are held against the rows of ``docs/reference/values.md``."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import value_of
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.settings import Settings
from noetl_dagster.values import RefusedValueError, admit, encode_json
from tests.conftest import PROJECT
from tests.playbooks import playbook
from tests.pool import working
from tests.values.kinds import KINDS, REFUSED, drawn

CASES = max(2_000, int(os.environ.get("FUZZ_EXAMPLES", "0")))
AT_ONCE = 20
"""Values in one result; of every third item, so that results are on both sides of the inline limit, fewer."""

SEED = 20_261_129
PAGE = PROJECT / "docs" / "reference" / "values.md"

FLOW = """
workload: {{seed: {seed}, items: {items}, marker: "{marker}"}}
workflow:
  - step: make
    spec: {{dispatch: {dispatch}}}
    loop: {{in: "{{{{ range(items) | list }}}}", iterator: n, mode: parallel}}
    tool:
      kind: python
      input: {{seed: "{{{{ seed }}}}", n: "{{{{ n }}}}"}}
      code: |
        from tests.values.test_crossings import numbers
        from tests.values.kinds import drawn
        result = [drawn(seed, number).value for number in numbers(n)]
    next: [{{step: see}}]
  - step: see
    spec: {{dispatch: {dispatch}}}
    loop: {{in: "{{{{ make.results }}}}", iterator: values, mode: parallel}}
    tool:
      kind: python
      input: {{marker: "{{{{ marker }}}}", index: "{{{{ loop.index }}}}", values: "{{{{ values }}}}"}}
      code: |
        import pathlib
        if index == 1 and not pathlib.Path(marker).exists():
            pathlib.Path(marker).touch()
            raise ValueError("once")
        result = [values, repr(values)]
    set: {{ctx.all: "{{{{ make.results }}}}"}}
    next: [{{step: child}}]
  - step: child
    tool: {{kind: playbook, path: tests/values/child, input: {{all: "{{{{ ctx.all }}}}"}}}}
    next: [{{step: apart}}]
  - step: apart
    tool:
      kind: python
      isolation: subprocess
      input: {{all: "{{{{ child }}}}"}}
      code: |
        def main(all):
            return {{"values": all, "text": repr(all)}}
    output: {{values: "{{{{ output.values }}}}", text: "{{{{ output.text }}}}"}}
"""


ROWS = """
workload: {{marker: "{marker}"}}
workflow:
  - step: make
    tool:
      kind: python
      code: |
        import pandas as pd, decimal
        moments = pd.to_datetime(["2026-01-02", "2026-01-03 04:05:06.000000007"], format="ISO8601")
        prices = [decimal.Decimal("1.10"), decimal.Decimal("2.20")]
        result = pd.DataFrame({{"ts": moments, "by": [b"a", b"\\xff"], "dec": prices, "n": [1.5, None]}}, index=[7, 9])
    next: [{{step: see}}]
  - step: see
    spec: {{dispatch: {dispatch}}}
    loop: {{in: "{{{{ make }}}}", iterator: row, mode: parallel}}
    tool:
      kind: python
      input: {{marker: "{{{{ marker }}}}", row: "{{{{ row }}}}"}}
      code: |
        import pathlib
        if row["dec"] == "2.20" and not pathlib.Path(marker).exists():
            pathlib.Path(marker).touch()
            raise ValueError("once")
        result = repr(row)
"""
FIRST = {"n": 1.5, "by": "YQ==", "ts": "2026-01-02T00:00:00", "dec": "1.10", "__index_level_0__": 7}
SECOND = {"n": None, "by": "/w==", "ts": "2026-01-03T04:05:06.000000007", "dec": "2.20", "__index_level_0__": 9}


def numbers(item: int) -> range:
    """The numbers of the values in an item."""
    return range(item * AT_ONCE, item * AT_ONCE + (AT_ONCE if item % 3 else 2))


def test_every_value_has_the_form_of_its_row() -> None:
    for number in range(CASES):
        value, form = drawn(SEED, number)
        stored = admit(value)
        assert stored == form, number
        assert repr(orjson.loads(encode_json(stored))) == repr(stored), number
        assert repr(admit(stored)) == repr(stored), number
    for number in range(CASES // 10):
        with pytest.raises(RefusedValueError, match="result"):
            admit(drawn(SEED, number, refused=True).value)


@pytest.mark.parametrize(("dispatch", "share"), [("inline", 1), ("workers", 4)])
async def test_values_arrive_as_they_left(
    engine: Engine, settings: Settings, tmp_path: Path, dispatch: str, share: int
) -> None:
    """In loops, from ``set`` and ``output``, after a resumption, from a child, from a subprocess, on a worker."""
    items = CASES // share // AT_ONCE
    text = FLOW.format(seed=SEED, items=items, marker=tmp_path / "failed", dispatch=dispatch)
    async with working(settings, "worker"):
        state = await engine.run(playbook(text))
        assert state.status is ExecutionStatus.FAILED
        assert "once" in (state.error or "")
        state = await engine.resume(state.execution_id)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    expected = [admit([drawn(SEED, number).form for number in numbers(n)]) for n in range(items)]
    assert [item[1] for item in await results_of(engine, state, "see")] == [repr(values) for values in expected]
    for name, values in (
        ("make", await results_of(engine, state, "make")),
        ("see", [item[0] for item in await results_of(engine, state, "see")]),
        ("ctx", state.ctx["all"]),
        ("child", await value_of(engine.runtime, state.latest["child"].envelope)),
    ):
        assert repr(values) == repr(expected), name
    assert await value_of(engine.runtime, state.latest["apart"].envelope) == {
        "text": repr(expected),
        "values": expected,
    }


@pytest.mark.parametrize("dispatch", ["inline", "workers"])
async def test_rows_of_a_table_are_the_same_items_in_every_run(
    engine: Engine, settings: Settings, tmp_path: Path, dispatch: str
) -> None:
    async with working(settings, "worker"):
        state = await engine.run(playbook(ROWS.format(marker=tmp_path / "failed", dispatch=dispatch)))
        assert "once" in (state.error or ""), state.error
        state = await engine.resume(state.execution_id)
    assert await results_of(engine, state, "see") == [repr(FIRST), repr(SECOND)]


async def results_of(engine: Engine, state: ExecutionState, step: str) -> list[Any]:
    """The values of a loop's items, from the log and the store."""
    value = await value_of(engine.runtime, state.latest[step].envelope)
    return [item.get("data", item) if isinstance(item, dict) else item for item in value]


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its first line."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]
    return rows[2:]


def test_the_table_has_a_row_for_every_kind_of_value_and_says_what_becomes_of_it() -> None:
    table = rows_of("Kinds of values")
    assert all(map(all, table))
    rows = {name: form for name, form, _ in table}
    assert list(rows) == list(KINDS)
    for name, draw in KINDS.items():
        form = draw(random.Random(1)).form
        assert rows[name].startswith("refused") == (form is REFUSED), name


def test_the_table_has_a_row_for_every_tool_and_no_empty_cell() -> None:
    rows = rows_of("What tools do with values")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named >= set(TOOL_KINDS), set(TOOL_KINDS) - named
    assert all(all(row) and len(row) == len(rows[0]) for row in rows)
