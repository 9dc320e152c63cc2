"""Checks of a step: what they ask, what the log keeps of them, and what a blocking one does."""

from __future__ import annotations

from typing import Any

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import CheckOutcome, ExecutionState
from tests.engine.conftest import Run

ROWS = [
    {"id": 1, "sex": "F", "age": 30, "at": "2020-01-01T00:00:00Z"},
    {"id": 2, "sex": "M", "age": 130, "at": "2020-01-02T00:00:00Z"},
    {"id": 2, "sex": "X", "age": None, "at": "2020-01-03T00:00:00Z"},
]


def flow(checks: str, *, result: str = "workload.rows", rest: str = "") -> str:
    return f"""
workload: {{rows: {ROWS!r}}}
workflow:
  - step: start
    tool: {{kind: python, input: {{rows: "{{{{ {result} }}}}"}}, code: "result = rows"}}
    checks: [{checks}]
{rest}
""".replace("None", "null")


def outcome(state: ExecutionState, name: str | None = None) -> CheckOutcome:
    found = state.checks_of("start", 1)
    return next(one for one in found if name in (None, one.name))


async def test_templates_over_the_result(run: Run) -> None:
    state = await run(
        flow('{name: some, when: "{{ output | length > 2 }}"}, {name: many, when: "{{ output | length > 9 }}"}')
    )
    assert state.status == "COMPLETED"
    some, many = state.checks_of("start", 1)
    assert (some.name, some.passed, some.why) == ("some", True, "")
    assert (many.passed, many.severity, many.blocking) == (False, "error", False)
    assert many.why == "{{ output | length > 9 }} is false"


async def test_a_template_that_cannot_be_rendered_has_not_passed(run: Run) -> None:
    state = await run(flow('{name: odd, when: "{{ nobody.knows > 3 }}", severity: warn}'))
    assert state.status == "COMPLETED"
    odd = outcome(state)
    assert (odd.passed, odd.severity) == (False, "warn")
    assert "nobody" in odd.why


QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("{unique: id}", "1 rows repeat id", {"duplicates": 1, "examples": [{"id": 2, "times": 2}]}),
    ("{unique: [id, sex]}", "", {"duplicates": 0}),
    ("{not_null: [id, age]}", "1 rows without age", {"nulls": 1}),
    ("{not_null: id}", "", {"nulls": 0}),
    ("{accepted: {sex: [F, M]}}", "1 rows with another sex", {"others": 1}),
    ("{accepted: {id: [1, 2]}}", "", {"others": 0}),
    ("{accepted: {age: [null]}}", "2 rows with another age", {"others": 2}),
    ("{between: {age: [0, 120]}}", "1 rows beyond in age", {"outside": 1}),
    ("{between: {age: [0, null], id: [1, 2]}}", "", {"outside": 0}),
    ("{between: {at: ['2020-01-02', null]}}", "1 rows beyond in at", {"outside": 1}),
    ("{row_count: 4}", "3 rows, wanted at least 4", {}),
    ("{row_count: {max: 2}}", "3 rows, wanted at most 2", {}),
    ("{row_count: {min: 4, max: 5}}", "3 rows, wanted 4 to 5", {}),
    ("{row_count: 3}", "", {}),
    ("{fresh: {at: 1000000d}}", "", {"newest at": "2020-01-03T00:00:00+00:00"}),
    ("{unique: agee}", "the result has no column 'agee'; did you mean 'age'?", {}),
]
"""A check, why it does not pass (empty if it does), and the facts that it measures."""


async def test_questions_about_rows(run: Run) -> None:
    checks = (check.replace("{", f"{{name: q{number}, ", 1) for number, (check, _, _) in enumerate(QUESTIONS))
    state = await run(flow(", ".join(checks)))
    for number, (check, why, facts) in enumerate(QUESTIONS):
        answer = outcome(state, f"q{number}")
        assert (answer.why, answer.passed) == (why, not why), check
        assert answer.facts.get("rows", 3) == 3
        assert answer.facts | facts == answer.facts, check


async def test_rows_that_are_too_old(run: Run) -> None:
    found = outcome(await run(flow("{fresh: {at: 1h}}")))
    assert not found.passed
    assert found.why.startswith("the newest at is ")


async def test_bad_rows_are_shown(run: Run) -> None:
    found = outcome(await run(flow("{between: {age: [0, 120]}}")))
    assert [row["age"] for row in found.facts["examples"]] == [130]


async def test_no_rows(run: Run) -> None:
    state = await run(
        flow("{unique: id}, {name: few, row_count: 1}, {fresh: {at: 1h}}", result="[]"),
    )
    assert [one.passed for one in state.checks_of("start", 1)] == [True, False, False]


async def test_a_result_that_has_no_rows(run: Run) -> None:
    found = outcome(await run(flow("{unique: id}", result="3")))
    assert "the result of start has no rows" in found.why


async def test_rows_of_a_table_are_read_where_they_lie(run: Run) -> None:
    text = """
workflow:
  - step: start
    tool: {kind: duckdb, as: table, command: "SELECT i % 10 AS id, i AS n FROM range(20000) t(i)"}
    checks: [{unique: id}, {unique: n}, {row_count: 20000}]
"""
    state = await run(text)
    assert "ref" in state.latest["start"].envelope
    assert [one.passed for one in state.checks_of("start", 1)] == [False, True, True]


async def test_rows_of_a_statement_and_of_a_loop(run: Run) -> None:
    text = """
workflow:
  - step: start
    tool: {kind: duckdb, command: "SELECT i AS id FROM range(3) t(i)"}
    checks: [{unique: id}, {row_count: 3}]
    next: [each]
  - step: each
    loop: {in: "{{ start.rows }}", iterator: row, spec: {mode: parallel}}
    tool: {kind: python, input: {row: "{{ row }}"}, code: "result = {'id': row['id'] // 2}"}
    checks: [{unique: id}, {row_count: 3}]
"""
    state = await run(text)
    assert [one.passed for one in state.checks_of("start", 1)] == [True, True]
    assert [one.passed for one in state.checks_of("each", 1)] == [False, True]


async def test_a_failed_blocking_check_fails_the_step(run: Run, engine: Engine) -> None:
    state = await run(flow("{unique: id, blocking: true}, {row_count: 1}"))
    assert state.status == "FAILED"
    assert "the result did not pass unique_id: 1 rows repeat id" in str(state.error)
    error = state.latest["start"].envelope["error"]
    assert (error["kind"], error["code"]) == ("check", "CHECK_FAILED")
    assert [(one.name, one.passed) for one in state.checks_of("start", 1)] == [
        ("unique_id", False),
        ("row_count", True),
    ]
    again = (await engine.runtime.load(state.execution_id)).state
    assert again.checks == state.checks


async def test_an_arc_may_take_the_failure(run: Run) -> None:
    state = await run(
        flow(
            "{unique: id, blocking: true}",
            rest="""
    next:
      - {step: mend, when: "{{ error.kind == 'check' }}"}
  - step: mend
    tool: {kind: noop}
""",
        )
    )
    assert state.status == "COMPLETED"
    assert "mend" in state.latest


async def test_checks_of_a_failed_step_are_not_asked(run: Run) -> None:
    text = """
workflow:
  - step: start
    tool: {kind: python, code: "raise ValueError('no')"}
    checks: [{unique: id}]
"""
    state = await run(text)
    assert state.status == "FAILED"
    assert not state.checks


async def test_each_check_is_an_event_before_the_end_of_its_step(run: Run, engine: Engine) -> None:
    state = await run(flow("{unique: id, severity: warn}, {row_count: 1}"))
    rows = await engine.runtime.pool.fetch(
        "SELECT event_type, status, meta ->> 'check' AS name, error, context FROM noetl.event "
        "WHERE execution_id = $1 AND event_type IN ('check.evaluated', 'step.exit') ORDER BY event_id",
        state.execution_id,
    )
    assert [(row["event_type"], row["status"], row["name"]) for row in rows] == [
        ("check.evaluated", "FAILED", "unique_id"),
        ("check.evaluated", "PASSED", "row_count"),
        ("step.exit", "COMPLETED", None),
    ]
    assert rows[0]["error"] == "1 rows repeat id"
    assert rows[0]["context"]["facts"]["duplicates"] == 1


async def test_untidy_rows_are_asked_all_the_same(run: Run) -> None:
    text = """
workload: {rows: [{a: 1}, {a: x, b: 3}, {a: [1, 2], b: {c: 1}}]}
workflow:
  - step: start
    tool: {kind: python, input: {rows: "{{ rows }}"}, code: "result = rows"}
    checks: [{unique: a}, {not_null: b}, {row_count: 3}]
"""
    state = await run(text)
    assert state.status == "COMPLETED", state.error
    assert [(one.name, one.passed, one.why) for one in state.checks_of("start", 1)] == [
        ("unique_a", True, ""),
        ("not_null_b", False, "1 rows without b"),
        ("row_count", True, ""),
    ]


async def test_examples_are_short(run: Run) -> None:
    text = """
workflow:
  - step: start
    tool: {kind: python, code: "result = [{**{f'c{n}': 'x' * 5000 for n in range(9)}, 'id': None}]"}
    checks: [{not_null: id}]
"""
    found = outcome(await run(text))
    (example,) = found.facts["examples"]
    assert list(example) == ["c0", "c1", "c2", "id"]
    assert len(example["c0"]) == 100


async def test_failed_items_of_a_loop_are_no_rows(run: Run) -> None:
    text = """
workflow:
  - step: start
    loop: {in: [1, 2, 3], iterator: n, spec: {mode: parallel, allow_partial: true}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'id': 6 // (n - 2)}"}
    checks: [{unique: id}, {name: few, row_count: 3}]
"""
    state = await run(text)
    assert state.status == "COMPLETED", state.error
    assert [(one.name, one.why) for one in state.checks_of("start", 1)] == [
        ("unique_id", ""),
        ("few", "2 rows, wanted at least 3"),
    ]
