"""Fields of tools: which are known, where they may stand, and what is said of others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.models import Assertion, Backoff, Tracing
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from tests.playbook.playbooks import errors_of, load, meaning, problems_of, step_of, task_of, warnings_of, with_steps

ENDS = {"source": {"table": "s"}, "target": {"table": "t"}}


def task_with(kind: str, **fields: object) -> str:
    return json.dumps({"kind": kind, **fields})


def needed_by(kind: str) -> dict[str, object]:
    needs = TOOL_KINDS[kind].needs if TOOL_KINDS[kind].needs_all else TOOL_KINDS[kind].needs[:1]
    words = TOOL_KINDS[kind].words
    return {name: ENDS.get(name, words.get(name, ("x",))[0]) for name in needs}


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_fields_below_spec_are_fields_of_the_tool(kind: str) -> None:
    fields = {**needed_by(kind), "args": {"a": 1}, "credential": "c"}
    policy = {"rules": [{"else": {"do": "continue"}}]}
    beside, below = (
        load(f"- step: start\n  tool: {tool}\n", root="workbook: {x: {kind: noop}}\n").steps[0].tasks[0]
        for tool in (
            task_with(kind, **fields, spec={"timeout": 5, "policy": policy}),
            task_with(kind, spec={**fields, "timeout": 5, "policy": policy}),
        )
    )
    assert meaning(below) == meaning(beside)
    assert (below.input, below.auth, below.spec.timeout) == ({"a": 1}, "c", 5.0)
    assert below.spec.options == {}
    assert below.config == needed_by(kind)


def test_fields_below_spec_of_a_list_of_tasks() -> None:
    step = step_of(
        """
        - step: start
          tool:
            - first: {kind: python, spec: {code: result = 1}}
            - {name: second, kind: http, spec: {endpoint: x, data: {a: 1}, isolation: none}}
        """
    )
    first, second = step.tasks
    assert first.config == {"code": "result = 1"}
    assert (second.config, second.spec.options) == ({"url": "x", "json": {"a": 1}}, {"isolation": "none"})


def test_a_field_in_both_places_is_an_error_at_the_second() -> None:
    steps = "- step: start\n  tool:\n    kind: python\n    code: a = 1\n    spec:\n      code: a = 2\n"
    assert errors_of(steps) == [
        "sample.yaml:10:9: step 'start': 'code' stands beside 'kind' and below 'spec'; keep one"
    ]
    twice = "- step: start\n  tool: {kind: postgres, command: a, spec: {query: b}}\n"
    assert "'command' and 'query' mean the same" in errors_of(twice)[0]


def test_what_is_wrong_below_spec_is_reported_there() -> None:
    steps = "- step: start\n  tool:\n    kind: http\n    spec:\n      url: x\n      method: FETCH\n"
    assert "sample.yaml:10:17: step 'start': method 'FETCH' is unknown" in errors_of(steps)[0]


def test_what_a_container_runs_may_stand_below_runtime() -> None:
    runtime = {"provider": "kubernetes", "image": "alpine", "timeoutSeconds": 60, "env": {"A": "1", "B": "2"}}
    tool = task_with("container", runtime=runtime, script="a.sh", env={"B": "3"}, serviceAccountName="etl")
    steps = f"- step: start\n  tool: {tool}\n"
    assert load(steps).steps[0].tasks[0].config == {
        "image": "alpine",
        "timeout": 60.0,
        "service_account": "etl",
        "script": "a.sh",
        "env": {"A": "1", "B": "3"},
    }
    [warning] = warnings_of(steps)
    assert "'provider' has no effect on a task of kind container" in warning


@pytest.mark.parametrize("kind", [kind for kind, known in TOOL_KINDS.items() if not known.takes_anything])
def test_a_field_that_nobody_knows_is_an_error_that_names_the_fields(kind: str) -> None:
    steps = f"- step: start\n  tool: {task_with(kind, **needed_by(kind), zzz=1)}\n"
    [problem] = [problem for problem in problems_of(steps) if problem.kind is ProblemKind.UNKNOWN_FIELD]
    assert f"{kind} has no field 'zzz'; fields of {kind}: {next(iter(TOOL_KINDS[kind].spellings))}" in problem.message
    assert problem.severity == "error"


def test_a_field_that_nobody_knows_is_a_warning_to_the_lenient() -> None:
    text = with_steps("- step: start\n  tool: {kind: python, code: a = 1, cods: b}\n")
    assert parse_report(text)[0] is None
    playbook, [problem] = parse_report(text, lenient=True)
    assert playbook is not None
    assert (problem.severity, problem.message) == (
        "warning",
        "step 'start': python has no field 'cods'; did you mean 'code'?",
    )


def test_words_of_the_step_inside_its_tool_are_sent_there() -> None:
    found = errors_of("- step: start\n  tool: {kind: python, code: a = 1, next: [start]}\n")
    assert "python has no field 'next'; it belongs to the step" in found[0]


def test_a_noop_may_carry_anything_without_effect() -> None:
    [problem] = problems_of("- step: start\n  tool: {kind: noop, anything: 1}\n")
    assert (problem.severity, problem.kind) == ("warning", ProblemKind.FIELD_WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("tool", "config", "warning"),
    [
        ("{kind: playbook, path: a, task: b}", {"path": "a"}, "'task' has no effect beside 'path'"),
        ("{kind: playbook, name: c, task: b}", {"path": "b"}, ""),
        ("{kind: playbook, name: c}", {"path": "c"}, ""),
        (
            '{kind: python, script: {source: {type: inline, code: "{{ workload.text }}"}}}',
            {"code": "result = 1"},
            "",
        ),
        ('{kind: python, script: {source: {type: inline}, code: "a = {{ text }}"}}', {"code": "a = {{ text }}"}, ""),
        ("{kind: python, code: a = 1, iterator: item}", {"code": "a = 1"}, "'iterator' has no effect"),
        ("{kind: container, image: a, restart_policy: Never}", {"image": "a"}, "'restart_policy' has no effect"),
        ("{kind: duckdb, command: a, gcs_credential: g}", {"command": "a"}, "'gcs_credential' has no effect"),
    ],
)
def test_what_others_write_beside_a_tool(tool: str, config: dict[str, Any], warning: str) -> None:
    steps, root = f"- step: start\n  tool: {tool}\n", "workload: {text: result = 1}\n"
    assert load(steps, root=root).steps[0].tasks[0].config == config
    assert warning in "".join(warnings_of(steps, root=root))


@pytest.mark.parametrize("word", ["desc", "description", "title", "version", "tags", "metadata", "notes"])
def test_words_for_readers_say_nothing(word: str) -> None:
    plain = "- step: start\n  tool: {kind: python, code: a = 1}\n"
    of_step = "" if word == "version" else f"  {word}: said\n"  # a field of playbooks, which stands there by mistake
    with_word = f"- step: start\n{of_step}  tool: {{kind: python, code: a = 1, {word}: said}}\n"
    assert problems_of(with_word) == []
    assert meaning(load(with_word).steps[0].tasks[0]) == meaning(load(plain).steps[0].tasks[0])


def test_a_time_limit_beside_a_tool_that_has_none_of_its_own() -> None:
    task = task_of("kind: duckdb\nquery: SELECT 1\ntimeout: 2m")
    assert (task.config, task.spec.timeout) == ({"command": "SELECT 1"}, 120.0)
    assert task_of("kind: http\nurl: x\ntimeout_seconds: 5").config["timeout"] == 5.0


def test_a_connection_written_beside_a_postgres_task() -> None:
    task = task_of('kind: postgres\nquery: SELECT 1\ndb_host: "{{ host }}"\ndb_port: 5433\ndb_name: work')
    assert task.auth == {"type": "postgres", "db_host": "{{ host }}", "db_port": 5433, "db_name": "work"}
    by_text = task_of("kind: postgres\nquery: SELECT 1\ndb_conn_string: postgresql://db/work")
    assert by_text.auth == {"type": "postgres", "connection_string": "postgresql://db/work"}


def test_code_and_sql_in_base64() -> None:
    assert task_of("kind: python\ncode_b64: cmVzdWx0ID0gMQ==").config == {"code": "result = 1"}
    assert task_of("kind: postgres\ncommand_b64: |\n  U0VMRUNU\n  IDE7").config == {"command": "SELECT 1;"}
    found = errors_of("- step: start\n  tool: {kind: python, code_b64: '%%'}\n")
    assert "code_b64 must be text in base64" in found[0]
    twice = errors_of("- step: start\n  tool: {kind: python, code: a = 1, code_b64: cmVzdWx0ID0gMQ==}\n")
    assert "'code' and 'code_b64' mean the same" in twice[0]


def test_a_pool_of_the_executor_that_dagster_does_not_know() -> None:
    steps = "- step: start\n  tool: {kind: noop}\n"
    [problem] = problems_of(steps, root="executor: {kind: distributed, spec: {pool: default}}\n")
    assert (problem.severity, problem.place.line) == ("warning", 4)
    assert "pool 'default' has no effect" in problem.message
    known = "executor: {spec: {pool: api}}\ndagster: {pools: {api: 2}}\n"
    assert load(steps, root=known).steps[0].spec.pool == "api"


def test_a_workbook_task_named_in_the_oldest_way() -> None:
    root = "workbook: {greet: {kind: noop}}\n"
    task = load("- step: start\n  tool: workbook\n  name: greet\n", root=root).steps[0].tasks[0]
    assert task.config == {"task": "greet"}


def test_places_of_fields_beside_a_tool_named_in_the_oldest_way() -> None:
    found = errors_of("- step: start\n  tool: http\n  url: x\n  method: FETCH\n")
    assert found[0].startswith("sample.yaml:8:13: step 'start': method 'FETCH' is unknown")
    assert errors_of("- step: start\n  tool: htp\n")[0].startswith("sample.yaml:6:11: ")


@pytest.mark.parametrize(
    ("written", "when", "attempts", "delay"),
    [
        ("{max_attempts: 4, retry_on: [connection, timeout]}",
         "{{ (error.kind in ['connection', 'timeout']) }}", 4, 1.0),
        ("{retry_on_status: [429, '503'], backoff_seconds: 2}", "{{ (error.status in [429, 503]) }}", None, 2.0),
        ("{retry_on: [rate_limit, 500], retry_on_status: 502, delay: 0}",
         "{{ (error.kind in ['rate_limit'] or error.status in [500, 502]) }}", None, 0.0),
        ("{attempts: 2, stop_when: '{{ output.ok }}'}", "{{ (not (output.ok)) }}", 2, 1.0),
        ("{stop_when: '{{ status_code == 404 }}'}", "{{ (error is defined) and (not (status_code == 404)) }}", None, 1.0),
        ("{retry_on: [connection_error, 5xx]}", "{{ (error.kind in ['connection', 'server_error']) }}", None, 1.0),
        ("{retry_on: http, when: '{{ output.tries < 3 }}'}",
         "{{ (error.kind in ['http']) and (output.tries < 3) }}", None, 1.0),
        ("{max_attempts: 2, retry_when: '{{ output.wait }}'}", "{{ output.wait }}", 2, 1.0),
        ("5", "{{ error is defined }}", 5, 1.0),
        ("true", "{{ error is defined }}", None, 1.0),
    ],
)  # fmt: skip
def test_retry_as_a_mapping(written: str, when: str, attempts: int | None, delay: float) -> None:
    for steps in (
        f"- step: start\n  tool: {{kind: noop}}\n  retry: {written}\n",
        f"- step: start\n  tool: {{kind: noop, retry: {written}}}\n",
    ):
        assert errors_of(steps) == []
        [rule] = load(steps).steps[0].tasks[0].retry
        assert (rule.when, rule.max_attempts, rule.delay) == (when, attempts, delay)


def test_limits_of_a_retry_mapping() -> None:
    [rule] = task_of("kind: noop\nretry: {backoff: exponential, max_delay: 5s, jitter: true}").retry
    assert (rule.backoff, rule.max_delay) == (Backoff.EXPONENTIAL, 5.0)
    assert task_of("kind: noop\nretry: false").retry == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{retry_on: [conection]}", "no error is of kind 'conection'; did you mean 'connection'?"),
        ("{retry_on_status: [often]}", "the text 'often' is no status such as 503"),
        ("{retry_on: [timeout], when: 'a {{ b }}'}", "when must be one template"),
        ("{retry_on: [timeout], tries: 3}", "unknown key 'tries'"),
        ("0", "max_attempts: input should be greater than or equal to 1"),
    ],
)
def test_mistakes_of_a_retry_mapping(written: str, expected: str) -> None:
    found = errors_of(f"- step: start\n  tool: {{kind: noop}}\n  retry: {written}\n")
    assert any(expected in error for error in found), found


@pytest.mark.parametrize(
    "entry",
    [
        "- {name: add, assert: {expects: [a, b], returns: total}, tool: {kind: python, code: x = 1}}",
        "- {name: add, tool: {kind: python, code: x = 1, assert: {expects: [a, b], returns: [total]}}}",
        "- {name: add, kind: python, code: x = 1, assert: {expects: [a, b], returns: [total]}}",
        "tasks: {add: {kind: python, code: x = 1, assert: {expects: [a, b], returns: [total]}}}",
    ],
)
def test_what_a_workbook_task_asserts(entry: str) -> None:
    steps = "- step: start\n  tool: {kind: workbook, name: add}\n"
    asserts = load(steps, root=f"workbook:\n  {entry}\n").workbook["add"].asserts
    assert asserts == Assertion(expects=("a", "b"), returns=("total",))


def test_an_assertion_knows_two_words() -> None:
    steps = "- step: start\n  tool: {kind: noop, assert: {expect: [a]}}\n"
    assert "unknown key 'expect'; did you mean 'expects'?" in errors_of(steps)[0]


NOTHING = "- step: start\n  tool: {kind: noop}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{}", Tracing()),
        ("true", Tracing()),
        ("false", Tracing(enabled=False)),
        ("{enabled: false}", Tracing(enabled=False)),
        ("{sampling: 0.1}", Tracing(sampling=0.1)),
        ("{sample_rate: '0.1'}", Tracing(sampling=0.1)),
        ("{endpoint: 'http://here:4318', service_name: me}", Tracing(endpoint="http://here:4318", service_name="me")),
    ],
)
def test_what_a_playbook_says_of_its_traces(words: str, expected: Tracing) -> None:
    assert load(NOTHING, root=f"tracing: {words}\n").tracing == expected
    assert problems_of(NOTHING, root=f"tracing: {words}\n") == []


def test_other_words_of_traces_are_pointed_out() -> None:
    assert load(NOTHING, root="tracing: {otlp_endpoint: 'http://a'}\n").tracing.endpoint == "http://a"
    [problem] = problems_of(NOTHING, root="tracing: {exporter: otlp}\n")
    assert (problem.severity, problem.kind) == ("error", ProblemKind.UNKNOWN_FIELD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{sampling: 2}", "sampling: input should be less than or equal to 1, found 2"),
        ("{sampling: often}", "sampling must be a number"),
        ("{endpoint: 'jaeger:6831'}", "endpoint: string should match pattern '^https?://'"),
    ],
)
def test_traces_that_cannot_be_are_refused(words: str, said: str) -> None:
    [error] = errors_of(NOTHING, root=f"tracing: {words}\n")
    assert said in error


def test_fields_of_a_container_in_kubernetes_own_spelling() -> None:
    mounts = [{"name": "in", "mountPath": "/in"}]
    volumes = [{"name": "in", "emptyDir": {}}]
    spellings = {"volumeMounts": mounts, "nodeSelector": {"disk": "fast"}}
    tool = task_with("container", image="i", volumes=volumes, **spellings)
    config = load(f"- step: start\n  tool: {tool}\n").steps[0].tasks[0].config
    assert config == {"image": "i", "volumes": volumes, "volume_mounts": mounts, "node_selector": {"disk": "fast"}}


@pytest.mark.parametrize("resumable", ["true", "auto", '"{{ again }}"'])
def test_words_of_transfer(resumable: str) -> None:
    tool = "{kind: transfer, source: {table: a}, target: {table: b}, on_drift: add, resumable: %s}"
    assert errors_of(f"- step: start\n  tool: {tool % resumable}\n") == []


@pytest.mark.parametrize("field", ["mode", "verify", "on_drift", "resumable"])
def test_a_word_that_transfer_does_not_know(field: str) -> None:
    ends = "source: {table: a}, target: {table: b}"
    [error] = errors_of(f"- step: start\n  tool: {{kind: transfer, {ends}, {field}: perhaps}}\n")
    assert f"{field} is the text 'perhaps'; use one of" in error


LITERAL_MISTAKES = {
    "{kind: postgres, command: SELECT 1, as: row}": "as is the text 'row'; did you mean 'rows'?",
    "{kind: duckdb, command: SELECT 1, as: row}": "as is the text 'row'; did you mean 'rows'?",
    "{kind: postgres, command: SELECT 1, key: [id, b]}": "key must be the name of one column, found a list",
    "{kind: postgres, command: SELECT 1, chunk_size: -5}": "chunk_size must be a number of rows, 1 or more, found -5",
    "{kind: postgres, command: SELECT 1, chunk_size: -1}": "chunk_size must be a number of rows, 1 or more, found -1",
    "{kind: duckdb, command: SELECT 1, batch_size: lots}": (
        "batch_size must be a number of rows, 1 or more, found the text 'lots'"
    ),
    "{kind: http, url: x, format: json lines}": "format is the text 'json lines'; use one of: jsonl, ndjson, csv, json",
    "{kind: nats, operation: subscribe, max_messages: 4}": "subscribe needs 'stream' or 'subject'",
    "{kind: transfer, source: {kind: nats}, target: {table: b}}": (
        "source: kind is the text 'nats'; use one of: postgres, mysql, sqlite, duckdb, object, http, result"
    ),
    "{kind: transfer, source: {table: a, query: SELECT 1}, target: {table: b}}": (
        "source: 'table' and 'query' both say what to read; keep one"
    ),
    "{kind: transfer, source: {tabel: a}, target: {table: b}}": ("source: unknown key 'tabel'; did you mean 'table'?"),
    "{kind: transfer, source: {path: a.txt, format: parket}, target: {table: b}}": (
        "source: format is the text 'parket'; did you mean 'parquet'?"
    ),
    "{kind: transfer, source: {url: x, paging: {nxt: a}}, target: {table: b}}": (
        "source, paging: unknown key 'nxt'; did you mean 'next'?"
    ),
    "{kind: transfer, source: {url: x, paging: {param: a, steps: rows}}, target: {table: b}}": (
        "source, paging: unknown key 'steps'; did you mean 'step'?"
    ),
    "{kind: transfer, source: {url: x, paging: {start: 1}}, target: {table: b}}": "paging needs 'next'",
    "{kind: transfer, source: {url: x, paging: {param: a, step: cols}}, target: {table: b}}": (
        "step must be a whole number or 'rows', found the text 'cols'"
    ),
    "{kind: transfer, source: {table: a}, target: {url: x}, verify: checksum}": (
        "verify: checksum reads the target back, which http cannot"
    ),
    "{kind: transfer, source: {table: a}, target: {path: x.parquet}, mode: append}": (
        "mode: append is not for one file, which is replaced as a whole; write mode: replace, or a folder"
    ),
    "{kind: transfer, source: {table: a}, target: {path: x.parquet, mode: upsert}}": (
        "mode: upsert is not for one file"
    ),
    "{kind: transfer, source: {table: a}, target: {path: x/}, mode: upsert}": "mode: upsert is for tables",
    "{kind: transfer, source: {table: a}, target: {kind: duckdb, table: b}, mode: upsert}": (
        "upsert into duckdb needs 'key'"
    ),
    "{kind: transfer, source: {table: a}, target: {path: x.parquet}, on_drift: add}": "on_drift: add is for tables of postgres and duckdb",
    "{kind: transfer, source: {table: a}, target: {path: x.parquet}, on_new_column: add}": "on_drift: add is for tables of postgres",
    "{kind: transfer, source: {table: a}, target: {kind: http, url: b}, resumable: true}": (
        "resumable: true is for postgres and duckdb targets, and folders"
    ),
    "{kind: transfer, source: {table: a}, target: {ref: x}}": "a result is no target",
}


@pytest.mark.parametrize(("tool", "expected"), LITERAL_MISTAKES.items())
def test_what_a_tool_would_refuse_is_found_beforehand(tool: str, expected: str) -> None:
    [error] = errors_of(f"- step: start\n  tool: {tool}\n")
    assert expected in error


@pytest.mark.parametrize(
    "tool",
    [
        '{kind: postgres, command: SELECT 1, as: Table, chunk_size: "20000"}',
        '{kind: postgres, command: SELECT 1, as: "{{ kind }}", chunk_size: "{{ n }}", key: "{{ key }}"}',
        '{kind: http, url: x, format: "{{ format }}"}',
        '{kind: nats, operation: "{{ what }}"}',
        "{kind: nats, operation: subscribe, subject: orders.>}",
        '{kind: transfer, source: "{{ from }}", target: {path: "{{ to }}"}, mode: append, resumable: true}',
        '{kind: transfer, source: {kind: "{{ kind }}", tabel: a}, target: {table: b}}',
        '{kind: transfer, source: {url: x, paging: "{{ paging }}"}, target: {table: b, mode: upsert}}',
        "{kind: transfer, source: {url: x, paging: {param: o, start: 0, step: rows}}, target: {path: x/, mode: append}}",
        "{kind: transfer, source: {kind: duckdb, database: a.db, table: y}, target: {table: b}, verify: checksum}",
        "{kind: transfer, source: {table: a}, target: {kind: s3, url: s3://lake/x/}, resumable: true}",
        "{kind: transfer, source: {table: a}, target: {kind: duckdb, table: b}, resumable: true}",
        "{kind: transfer, source: {kind: http, url: x, method: POST, verify_ssl: false}, target: {kind: http, url: y}}",
    ],
)
def test_what_a_tool_takes_or_learns_when_it_runs_is_no_mistake(tool: str) -> None:
    workload = "workload: {kind: a, n: 1, key: a, format: a, what: a, from: a, to: a, paging: a}"
    assert problems_of(f"- step: start\n  tool: {tool}\n", root=workload + "\n") == []
