"""Broken playbooks are refused, each with its place and a remedy, and all problems at once."""

from __future__ import annotations

import pytest

from noetl_dagster import extras
from noetl_dagster.errors import PlaybookError, ProblemKind
from noetl_dagster.playbook.loader import load_playbook, load_report, parse_playbook, parse_report
from noetl_dagster.playbook.models import ARC_WORDS, Playbook
from tests.playbook.playbooks import HEAD, errors_of, problems_of, warnings_of, with_steps

OK_TOOL = "tool: {kind: noop}"
FEEDING = f"- step: start\n  {OK_TOOL}\n  next: [{{step: take, on: call.partial}}]\n"
PARTITIONS = """  loop: {in: [1], iterator: x}
  spec: {loop_mode: fanout, fanout: {granularity: partition}}
"""

BROKEN_TOOLS = [
    ("{url: x}", "sample.yaml:6:11: step 'start': a tool needs 'kind'"),
    ("5", "tool must be a mapping with 'kind' or a list of tasks"),
    ("[]", "tool is an empty list"),
    (
        "{kind: oracle, command: SELECT 1}",
        "sample.yaml:6:18: step 'start': tool kind 'oracle' is not supported; supported: artifact, bigquery, container",
    ),
    ("{kind: agent, framework: adk}", "call the model's API with kind http"),
    (
        "{kind: mcp, server: files, method: tools/list}",
        "sample.yaml:6:18: step 'start': tool kind 'mcp' is not supported: a server of the Model Context Protocol is called with kind http",
    ),
    ("{kind: s3, operation: copy, key: a}", "operation is the text 'copy'"),
    ("{kind: gcs, keyy: a}", "gcs has no field 'keyy'; did you mean 'key'?"),
    ("{kind: pyton, code: x}", "did you mean 'python'?"),
    ("{kind: python, script: {source: {type: inline}}}", "script of source type 'inline' needs 'code'"),
    ("{kind: http}", "http needs 'url'"),
    ("{kind: postgres, comand: x}", "postgres needs 'command'"),
    ("{kind: playbook}", "playbook needs 'path'"),
    ("{kind: noop, spec: {policy: {rules: [{else: {then: {do: jump}}}]}}}", "jump needs 'to'"),
    (
        "{kind: noop, spec: {policy: {rules: [{when: true, then: {do: stop}}]}}}",
        "do is 'stop'; use one of continue, retry, jump, break, fail",
    ),
    ("{kind: noop, spec: {policy: {rules: [{when: true}]}}}", "a rule needs 'then'"),
    ("{kind: noop, spec: {policy: {rules: [{then: {do: fail}}]}}}", "a rule needs 'when' and 'then'"),
    ("{kind: noop, spec: {policy: {rule: []}}}", "a policy needs 'rules'"),
    ("{kind: noop, spec: {policy: {rules: {when: true}}}}", "rules must be a list"),
    ("{kind: noop, spec: {policy: {rules: [{else: {do: fail}}, {else: {do: fail}}]}}}", "a policy has one else rule"),
    (
        "{kind: noop, spec: {policy: {rules: [{when: true, then: {do: retry, attempts: many}}]}}}",
        "attempts must be a number, found the text 'many'",
    ),
    (
        "{kind: noop, spec: {policy: {rules: [{when: true, then: {do: retry, attempts: 0}}]}}}",
        "attempts: input should be greater than or equal to 1",
    ),
    (
        "{kind: noop, spec: {policy: {rules: [{when: true, then: {do: retry, backoff: slow}}]}}}",
        "backoff is 'slow'; use one of none, linear, exponential",
    ),
    (
        "{kind: secrets, provider: kubernets, secret: x}",
        "sample.yaml:6:37: step 'start': provider is the text 'kubernets'; did you mean 'kubernetes'?",
    ),
    ("{kind: http, url: x, method: FETCH}", "method 'FETCH' is unknown; use one of GET, POST"),
    (
        "{kind: transfer, source: {ref: a}, target: {kind: mysql, auth: a, table: t}, mode: upsert}",
        "upsert into mysql needs 'key': its unique columns",
    ),
    (
        "{kind: transfer, source: {ref: a}, target: {kind: sqlite, database: a, table: t}, verify: checksum}",
        "verify: checksum cannot compare the types of sqlite; write verify: rows",
    ),
    (
        "{kind: transfer, source: {ref: a}, target: {kind: snowflake, auth: a, table: t}}",
        "snowflake is a source only: its tables do not refuse a row that is written twice; write files to a bucket",
    ),
    ('{kind: http, url: "{{ a"}', "does not parse"),
    ('{kind: http, url: "{{ a | tojsn }}"}', "no filter is called 'tojsn'"),
    ("{kind: http, url: {{ a }} }", "a template must be quoted"),
    ("{kind: workbook, task: nope}", "no workbook task 'nope'; workbook: none"),
    ("{kind: noop, spec: {result: {store: floppy}}}", "store is 'floppy'; use one of memory, kv"),
    ("{kind: noop, input: text}", "input must be a mapping"),
    ("{kind: http, url: a, endpoint: b}", "'url' and 'endpoint' mean the same; keep 'url'"),
    (
        "{kind: noop, retry: {max_attempts: 2, backoff: 5, delay: 2}}",
        "sample.yaml:6:58: step 'start', retry rule 1: 'backoff: 5' and 'delay' both say how long to wait; keep one",
    ),
    (
        "{kind: noop, spec: {on_error: ignore}}",
        "sample.yaml:6:41: step 'start', spec, on_error: do is 'ignore'; use one of continue, retry, jump, break, fail",
    ),
    ("{kind: noop, spec: {on_error: jump}}", "jump needs 'to', the name of a task of this step"),
    (
        "{kind: noop, spec: {timout: 3}}",
        "sample.yaml:6:31: step 'start', spec: unknown key 'timout'; did you mean 'timeout'?",
    ),
    ("{kind: noop, spec: {dispatch: workers}}", "unknown key 'dispatch'; write it in the spec of the step"),
    (
        "{kind: http, url: x, spec: {timeout: {conect: 3}}}",
        "spec, timeout: unknown key 'conect'; did you mean 'connect'?",
    ),
    (
        "{kind: noop, spec: {policy: {ruls: [], admit: true}}}",
        "spec, policy: unknown key 'ruls'; did you mean 'rules'?",
    ),
    ('{kind: noop, set: {a: {b: ["{{ keychain.a.b }}"]}}}', "set a: a value of the keychain would be stored"),
]
"""A ``tool`` of a step, and what is said about it."""

BROKEN_KEYS = [
    ("nexxt: end", "sample.yaml:7:5: step 'start': unknown key 'nexxt'; did you mean 'next'?"),
    ("case: []", "unknown key 'case'; routes are written as next: {arcs"),
    ("next: nowhere", "sample.yaml:7:11: step 'start': next leads to unknown step 'nowhere'"),
    ("next: {arcs: [{when: true}]}", "an arc needs 'step'"),
    ("next: [{when: true, then: [{step: start}]}]", "unknown key 'then'; an arc names its target"),
    ("next: {spec: {mode: exclusive}}", "a router needs 'arcs'"),
    ("next: {spec: {mode: both}, arcs: [{step: start}]}", "mode is 'both'; use one of exclusive, inclusive"),
    ("loop: {iterator: x}", "a loop needs 'in'"),
    ("loop: {in: 5, iterator: x}", "sample.yaml:7:16: step 'start', loop: in must give a list, found 5"),
    ("loop: {in: workload.items, iterator: x}", "in must give a list, found the text 'workload.items'"),
    ("loop: {in: [1], iterator: my item}", "iterator 'my item' cannot be a name in templates"),
    (
        "loop: {in: [1], iterator: x, spec: {mode: wild}}",
        "mode is 'wild'; use one of sequential, parallel, chunked, cursor, stream, fanout",
    ),
    ("loop: {in: [1], iteratr: x}", "unknown key 'iteratr'; did you mean 'iterator'?"),
    (
        "loop: {in: [1], spec: {max_inflight: 2}}",
        "loop, spec: unknown key 'max_inflight'; did you mean 'max_in_flight'?",
    ),
    ("loop: {cursor: {claim: SELECT 1, hint: 2}}", "loop, cursor: unknown key 'hint'; known keys: kind, auth"),
    (
        "loop: {cursor: {claim: SELECT 1}, spec: {frame: {max_row: 2}}}",
        "unknown key 'max_row'; did you mean 'max_rows'?",
    ),
    ("spec: {next_mode: inclusive}", "step 'start', spec: unknown key 'next_mode'; known keys: loop_mode"),
    ("next: {spec: {mod: inclusive}, arcs: [{step: start}]}", "next, spec: unknown key 'mod'; did you mean 'mode'?"),
    ('next: [{step: start, set: {ctx.a: "{{ keychain.a }}"}}]', "set ctx.a: a value of the keychain would be stored"),
    ("loop: {cursor: {kind: postgres}, iterator: x}", "'claim' is missing: SQL that claims work"),
    (
        "loop: {cursor: {kind: duckdb, claim: SELECT 1}, iterator: x}",
        "cursor kind 'duckdb' is not supported; use postgres, mysql, sqlite",
    ),
    (
        "loop: {cursor: {kind: sqlite, claim: SELECT 1}, iterator: x}",
        "a cursor of kind sqlite needs 'database', its file",
    ),
    (
        "loop: {cursor: {kind: mysql, db_path: a, claim: SELECT 1}, iterator: x}",
        "a cursor of kind mysql has no 'db_path'; its credential names the database",
    ),
    (
        "loop: {cursor: {kind: mysql, claim: SELECT 1, release: SELECT 2}, iterator: x}",
        "let the claim take rows whose own lease has expired",
    ),
    ("sink: {tool: file, path: a, on_new_column: add}", "a sink of tool file has no 'on_new_column'"),
    (
        "sink: {tool: sqlite, database: d, table: t, on_new_column: add}",
        "on_new_column: add is for postgres and duckdb; write ignore or fail, or add the column yourself",
    ),
    (
        "sink: {tool: postgres, auth: a, command: SELECT 1, on_new_column: add}",
        "on_new_column is for 'table'; 'command' names its columns itself",
    ),
    (
        "sink: {tool: postgres, auth: a, table: t, on_new_column: widen}",
        "on_new_column is 'widen'; use one of add, ignore, fail, error",
    ),
    ("sink: {tool: sqlite, table: t}", "a sink of tool sqlite needs 'database', the file that the table is in"),
    ("sink: {tool: mysql, auth: a, table: t, mode: upsert}", "upsert into mysql needs 'key'"),
    (
        "loop: {in: [1], iterator: x, spec: {max_in_flight: 0}}",
        "max_in_flight: input should be greater than or equal to 1",
    ),
    ("spec: {loop_mode: fanout}", "loop_mode: fanout needs a 'loop'"),
    ("set: {workload.a: 1}", "workload is read-only; write ctx.a"),
    ("sink: {tool: postgres}", "a sink needs 'table'"),
    ("loop: {in: [1], iterator: x, mode: stream}", "mode stream is of steps that an arc on: call.partial leads to"),
    ("retry: [{when: true}]", "'then' is missing; a retry rule is {when, then: {max_attempts, ...}}"),
]
"""A key beside the tool of a step."""

BROKEN_TAKERS = [
    ("loop: {in: [1], iterator: x}", "leave out 'in', or loop over the rows of a chunk in a child playbook"),
    ("loop: {mode: parallel}", "leave out the mode, or say the arc on: step.done"),
    (
        "set: {ctx.n: '{{ chunk.row_count }}'}",
        "sample.yaml:8:11: step 'take': set and output: there is no 'chunk' when the step has ended; write it in its task",
    ),
    (
        "output: {n: '{{ chunk.row_count }}'}",
        "step 'take': set and output: there is no 'chunk' when the step has ended; write it in its task",
    ),
    ("next: [start]", "is part of a stream, and its arc to 'start' leads back into that"),
    (
        "loop: {spec: {max_in_flight: 0}}",
        "sample.yaml:10:11: step 'take', loop: max_in_flight: input should be greater than or equal to 1, found 0",
    ),
    (
        "spec: {allow_partial: true}",
        "allow_partial has no effect on a step that takes chunks; write loop: {spec: {allow_partial: ...}}",
    ),
]
"""A key of a step that takes chunks."""

BROKEN_STEPS = {
    "command beside tool": (
        "- step: start\n  tool:\n    kind: postgres\n  command: SELECT 1\n",
        "sample.yaml:8:5: step 'start': 'command' stands beside 'tool' instead of inside it",
    ),
    "heartbeat longer than its lease": (
        f"- step: start\n  {OK_TOOL}\n  loop:\n    cursor: {{auth: pg, claim: SELECT 1}}\n    iterator: row\n"
        "    spec:\n      mode: cursor\n      frame: {lease_seconds: 30, heartbeat_seconds: 1m}\n",
        "heartbeat_seconds must be less than lease_seconds",
    ),
    "neither tool nor next": ("- step: start\n  input: {a: 1}\n", "a step needs 'tool' or 'next'"),
    "step without name": (f"- {OK_TOOL}\n", "step 1: a step needs 'step', its name"),
    "step is text": ("- start\n", "step 1: expected a mapping (key: value), found the text 'start'"),
    "duplicate step": (
        f"- step: start\n  {OK_TOOL}\n- step: start\n  {OK_TOOL}\n",
        "sample.yaml:7:11: step 'start': step name 'start' occurs twice (first on line 5); rename one",
    ),
    "unknown target": (
        f"- step: start\n  {OK_TOOL}\n  next:\n    arcs:\n      - step: finsh\n- step: finish\n  {OK_TOOL}\n",
        "sample.yaml:9:17: step 'start': next leads to unknown step 'finsh'; did you mean 'finish'?",
    ),
    "duplicate task": (
        "- step: start\n  tool:\n    - {name: a, kind: noop}\n    - {name: a, kind: noop}\n",
        "sample.yaml:8:9: step 'start': task name 'a' occurs twice (first on line 7); rename one",
    ),
    "jump to nowhere": (
        "- step: start\n  tool:\n    - name: a\n      kind: noop\n      spec: {policy: {rules: "
        "[{when: true, then: {do: jump, to: c}}]}}\n    - {name: b, kind: noop}\n",
        "sample.yaml:9:67: step 'start', task 'a', spec, policy, rule 1, then: jump to unknown task 'c'; tasks of this step: a, b",
    ),
    "loop without tool": ("- step: start\n  loop: {in: [1], iterator: x}\n  next: []\n", "a loop needs a 'tool'"),
    "fan-out in a cycle": (
        f"- step: start\n  {OK_TOOL}\n  loop: {{in: [1], iterator: x}}\n  spec: {{loop_mode: fanout}}\n"
        "  next: [{step: start, when: '{{ ctx.more }}'}]\n",
        "sample.yaml:5:11: step 'start': a fan-out cannot stand in a cycle (start -> start)",
    ),
    "partitions with a sink": (
        "- step: start\n  tool: {kind: noop, sink: {tool: postgres, auth: pg, table: t}}\n" + PARTITIONS,
        "a 'sink' writes each item's result with the item's completion, and partitions have none; "
        "use fanout.granularity: item",
    ),
    "partitions with a retry block": (
        "- step: start\n  tool: {kind: noop}\n  retry: [{when: true, then: {max_attempts: 2}}]\n" + PARTITIONS,
        "a 'retry' block makes commands of an item's attempts, and partitions have none",
    ),
    "partitions in the pool": (
        f"- step: start\n  {OK_TOOL}\n" + PARTITIONS.replace("{gran", "{engine: workers, gran"),
        "a worker of the pool runs an item's command, and partitions have none",
    ),
    "broken template": (
        '- step: start\n  tool:\n    kind: http\n    url: "http://x/{{ a | }}"\n',
        "sample.yaml:8:12: url: template 'http://x/{{ a | }}' does not parse",
    ),
    "chunks and another arc": (
        FEEDING.replace("}]", "}, {step: other}]")
        + f"- step: take\n  {OK_TOOL}\n- step: other\n  {OK_TOOL}\n  next: [take]\n",
        "is not the only one into that step: there is one from 'other' as well",
    ),
    "chunks for the beginning": (
        f"- step: start\n  {OK_TOOL}\n  next: [take]\n"
        f"- step: take\n  {OK_TOOL}\n  next: [{{step: start, on: call.partial}}]\n",
        "leads to where the playbook starts, before there is a chunk",
    ),
    "chunks for itself": (
        f"- step: start\n  {OK_TOOL}\n  next: [take]\n"
        f"- step: take\n  {OK_TOOL}\n  next: [{{step: take, on: call.partial}}]\n",
        "leads to the step itself",
    ),
    "chunks that set": (
        FEEDING.replace("}]", ", set: {ctx.n: 1}}]") + f"- step: take\n  {OK_TOOL}\n",
        "has a 'set', which would be written once for each chunk; write it in the task of 'take', which sees",
    ),
    "a step that sets by the chunk of its own name": (
        FEEDING
        + f"- step: take\n  {OK_TOOL}\n  loop: {{iterator: page}}\n  set: {{ctx.a: {{b: ['{{{{ page.rows }}}}']}}}}\n",
        "step 'take': set and output: there is no 'page' when the step has ended",
    ),
    "chunks of nothing": (
        FEEDING.replace(OK_TOOL, "desc: x") + f"- step: take\n  {OK_TOOL}\n",
        "waits for chunks, and without a 'tool' it makes none",
    ),
    "chunks of a fan-out": (
        FEEDING + f"  loop: {{in: [1], iterator: x}}\n  spec: {{loop_mode: fanout}}\n- step: take\n  {OK_TOOL}\n",
        "cannot leave a fan-out",
    ),
    "an arc that listens to nothing": (
        f"- step: start\n  {OK_TOOL}\n  next: [{{step: take, on: call.partail}}]\n- step: take\n  {OK_TOOL}\n",
        "sample.yaml:7:29: step 'start', arc 1: no event of a step is called 'call.partail'; did you mean 'call.partial'?",
    ),
    "an arc that listens to another event of the log": (
        f"- step: start\n  {OK_TOOL}\n  next: [{{step: take, on: loop.item}}]\n- step: take\n  {OK_TOOL}\n",
        "no event of a step is called 'loop.item'; use one of: step.done, call.done, loop.done",
    ),
}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        *((f"- step: start\n  tool: {tool}\n", expected) for tool, expected in BROKEN_TOOLS),
        *((f"- step: start\n  {OK_TOOL}\n  {key}\n", expected) for key, expected in BROKEN_KEYS),
        *((FEEDING + f"- step: take\n  {OK_TOOL}\n  {key}\n", expected) for key, expected in BROKEN_TAKERS),
        *BROKEN_STEPS.values(),
    ],
)
def test_broken_step_is_refused_at_its_place(steps: str, expected: str) -> None:
    found = errors_of(steps)
    assert any(expected in error for error in found), found


ONE_STEP = f"workflow: [{{step: a, {OK_TOOL}}}]\n"
BROKEN_ROOTS = [
    ("kind: Playbook\n" + ONE_STEP, "'apiVersion' is missing"),
    (
        "apiVersion: noetl.io/v1\nkind: Playbook\n" + ONE_STEP,
        "x.yaml:1:13: playbook: apiVersion is 'noetl.io/v1', expected noetl.io/v2",
    ),
    ("apiVersion: noetl.io/v2\n" + ONE_STEP, "'kind' is missing"),
    ("apiVersion: noetl.io/v2\nkind: Credential\n" + ONE_STEP, "kind is 'Credential', expected Playbook"),
    (HEAD, "'workflow' is missing"),
    (HEAD + "workflow: []\n", "workflow must be a list of steps, found nothing"),
    (HEAD + "workflow: {a: 1}\n", "workflow must be a list of steps, found a mapping"),
    (HEAD + "worklod: {}\n" + ONE_STEP, "x.yaml:4:1: playbook: unknown key 'worklod'; did you mean 'workload'?"),
    (
        HEAD + "spec: {dispatch: workers}\n" + ONE_STEP,
        "x.yaml:4:8: playbook, spec: unknown key 'dispatch'; write it in executor: {spec: {...}}",
    ),
    (
        HEAD + "spec: []\n" + ONE_STEP,
        "playbook: spec must be a mapping such as {timeout: 5m, on_error: continue}, found a list",
    ),
    (
        HEAD + "spec: {on_error: {do: wait}}\n" + ONE_STEP,
        "x.yaml:4:23: playbook, spec, on_error: do is 'wait'; use one of continue",
    ),
    (HEAD + "vars: {}\n" + ONE_STEP, "unknown key 'vars'"),
    (HEAD + "spec: {timeoout: 5}\n" + ONE_STEP, "playbook, spec: unknown key 'timeoout'; did you mean 'timeout'?"),
    (HEAD + "executor: {spec: {kubernets: {}}}\n" + ONE_STEP, "unknown key 'kubernets'; did you mean 'kubernetes'?"),
    (HEAD.replace("path:", "pat:") + ONE_STEP, "metadata: unknown key 'pat'; did you mean 'path'?"),
]


BROKEN_ROOTS += [
    (HEAD + f"workload: {{a: {value}}}\n" + ONE_STEP, f"x.yaml:4:15: {what}; quote it if text is meant")
    for value, what in [
        (
            "12345678901234567890.5",
            "value '12345678901234567890.5': neither a 64-bit integer nor a double holds it",
        ),
        (
            "1234567890123456.78",
            "value '1234567890123456.78': neither a 64-bit integer nor a double holds it",
        ),
        ("18446744073709551616", "value '18446744073709551616': neither a 64-bit integer nor a double holds it"),
        ("1.0e+999", "value '1.0e+999': neither a 64-bit integer nor a double holds it"),
        (".inf", "value '.inf': neither a 64-bit integer nor a double holds it"),
        (".NaN", "value '.NaN': neither a 64-bit integer nor a double holds it"),
        ("!!binary aGk=", "value 'aGk=': the tag !!binary is not supported"),
    ]
] + [
    (
        HEAD + f"workload: {{a: !!{tag}}}\n" + ONE_STEP,
        f"x.yaml:4:15: the tag 'tag:yaml.org,2002:{tag.split()[0]}' is unknown",
    )
    for tag in ["set {a, b}", "omap [a: 1]", "pairs [a: 1]"]
]


@pytest.mark.parametrize(("text", "expected"), BROKEN_ROOTS)
def test_broken_document_is_refused_at_its_place(text: str, expected: str) -> None:
    with pytest.raises(PlaybookError) as raised:
        parse_playbook(text, file="x.yaml")
    assert expected in str(raised.value)


def test_all_problems_are_reported_at_once_in_file_order() -> None:
    found = errors_of(
        """
        - step: start
          tool: {kind: pyton}
          next: [{step: b}]
          colour: red
        - step: c
          tool: {kind: http, url: "{{ a"}
        """
    )
    lines = [int(error.split(":")[1]) for error in found]
    assert lines == sorted(lines)
    assert len(found) == 4


NOT_UNDERSTOOD = {
    "a kind": ("- step: start\n  tool: {kind: quantum, command: SELECT 1}\n", "tool kind 'quantum' is not supported"),
    "a field of a tool": ("- step: start\n  tool: {kind: python, code: a = 1, cods: b}\n", "has no field 'cods'"),
    "a key of a step": (f"- step: start\n  {OK_TOOL}\n  colour: red\n", "unknown key 'colour'"),
    "a key of an arc": (
        f"- step: start\n  {OK_TOOL}\n  next: [{{step: a, whne: x}}]\n- {{step: a, {OK_TOOL}}}\n",
        "unknown key 'whne'; did you mean 'when'?",
    ),
    "a key of a loop": (
        f"- step: start\n  {OK_TOOL}\n  loop: {{in: [1], iterator: i, slowly: true}}\n",
        "unknown key 'slowly'",
    ),
}


@pytest.mark.parametrize(("steps", "message"), NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD)
def test_lenient_loading_warns_about_what_is_not_understood(steps: str, message: str) -> None:
    text = with_steps(steps)
    assert any(message in error for error in errors_of(steps))
    playbook, [problem] = parse_report(text, lenient=True)
    assert (problem.severity, message in problem.message) == ("warning", True)
    assert playbook is not None
    assert (playbook.lenient, playbook.warnings) == (True, (f"line {problem.place.line}: {problem.message}",))
    assert playbook.stored is not None
    again = Playbook.from_stored(playbook.stored, text, file=playbook.file, renamed={}, lenient=True)
    assert again == playbook


def test_an_execution_shows_the_first_warnings() -> None:
    keys = "".join(f", k{number}: 1" for number in range(14))
    playbook = parse_playbook(with_steps(f"- step: start\n  tool: {{kind: python, code: a = 1{keys}}}\n"), lenient=True)
    assert len(playbook.warnings) == 14
    assert playbook.main_warnings[:10] == list(playbook.warnings[:10])
    assert playbook.main_warnings[10:] == ["and 4 more; 'noetl-dagster check --lenient' lists them"]


def test_kinds_whose_extra_is_missing_load_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "- step: start\n  tool: {kind: container, image: busybox}\n"
    assert problems_of(steps) == []
    monkeypatch.setattr(extras, "EXTRAS", {"k8s": "no_such_package.client"})
    [problem] = problems_of(steps)
    text = "kind container needs the extra k8s: pip install 'noetl-dagster[k8s]'; it is not installed here"
    assert text in problem.message
    assert (problem.severity, problem.kind) == ("warning", ProblemKind.MISSING_EXTRA)


@pytest.mark.parametrize("word", ARC_WORDS)
def test_what_an_arc_may_listen_to(word: str) -> None:
    steps = f"- step: start\n  {OK_TOOL}\n  next: [{{step: take, on: {word}}}]\n- step: take\n  {OK_TOOL}\n"
    assert problems_of(steps) == []


def test_missing_file_is_a_problem_with_its_path(tmp_path) -> None:
    missing = tmp_path / "missing.yaml"
    assert load_report(missing)[0] is None
    with pytest.raises(PlaybookError, match=r"missing\.yaml:1:1: cannot be read"):
        load_playbook(missing)


def test_a_sink_to_files_in_a_step_for_workers_is_a_warning() -> None:
    found = warnings_of(
        "- step: start\n  spec: {dispatch: workers}\n  tool: {kind: noop, sink: {tool: file, path: rows}}\n"
    )
    assert found == [
        "sample.yaml:5:11: warning: step 'start': its sink writes files; it runs in the driver, not in workers; "
        "write to a bucket or to postgres to have workers run it"
    ]


def test_unreachable_steps_are_warnings() -> None:
    found = warnings_of("- step: start\n  tool: {kind: noop}\n- step: island\n  tool: {kind: noop}\n")
    assert found == ["sample.yaml:7:11: warning: step 'island': no path leads here from 'start'; it never runs"]


def test_names_that_nothing_defines_are_warnings() -> None:
    steps = """
        - step: start
          tool: {kind: http, url: "{{ workload.base }}/{{ usr.id }}"}
          loop: {in: [1], iterator: user}
        """
    assert warnings_of(steps) == [
        "sample.yaml:6:29: warning: url: nothing in the playbook defines 'usr'; did you mean 'user'?"
    ]


def test_names_of_results_are_known() -> None:
    steps = """
        - step: start
          tool: [{name: fetch, kind: noop}, {kind: noop, result: "{{ fetch_result }} {{ result }} {{ fetched_result }}"}]
          next: [end]
        - step: end
          tool: {kind: noop, result: "{{ start_result }} {{ fetch_result }}"}
        """
    [warning] = warnings_of(steps)
    assert "nothing in the playbook defines 'fetched_result'; did you mean 'fetch_result'?" in warning


def test_a_condition_without_template_is_pointed_out() -> None:
    steps = "- step: start\n  tool: {kind: noop}\n  next: [{step: start, when: \"output.status == 'ok'\"}]\n"
    assert "is always true" in warnings_of(steps)[0]


KIND_TESTS = """
  - step: start
    tool: {kind: noop}
    next:
      - {step: a, when: "{{ error.kind == 'http' }}"}
      - {step: a, when: "{{ output.error.kind in ['timeout', 'postgres'] }}"}
      - {step: a, when: "{{ error['kind'] != 'python' and error.source == 'http' }}"}
  - {step: a, tool: {kind: noop}}
"""


def test_tools_compared_with_kinds_of_error_are_pointed_out() -> None:
    _, problems = parse_report(f"{HEAD}workflow:{KIND_TESTS}")

    assert [str(problem).partition("write ")[2] for problem in problems] == [
        "error.source == 'http'",
        "error.source == 'postgres'",
    ]


def test_events_that_no_arc_sees_are_pointed_out() -> None:
    when = "{{ event.name == 'call.dome' or event.name in ['step.done', \\\"loop.itm\\\"] }}"
    steps = f'- step: start\n  {OK_TOOL}\n  next: [{{step: end, when: "{when}"}}]\n- step: end\n  {OK_TOOL}\n'
    found = warnings_of(steps)
    assert [warning.partition("event.name is never ")[2] for warning in found] == [
        "'call.dome'; did you mean 'call.done'?",
        "'loop.itm'; names of events: " + ", ".join(ARC_WORDS),
    ]


def test_a_condition_with_text_around_its_template_is_pointed_out() -> None:
    steps = '- step: start\n  tool: {kind: noop}\n  next: [{step: start, when: "{{ ctx.a }} == 1"}]\n'
    assert "put the whole condition into {{ }}" in warnings_of(steps)[0]
    block = '- step: start\n  tool: {kind: noop}\n  next: [{step: start, when: "{% if ctx.a %}yes{% endif %}"}]\n'
    assert warnings_of(block) == []


def test_braces_in_code_are_no_templates() -> None:
    steps = """
        - step: start
          tool:
            kind: python
            code: |
              result = f"{{not a template {1}"
        """
    assert errors_of(steps) == []


def test_settings_know_what_there_is_when_their_step_is_entered() -> None:
    steps = """
        - step: each
          loop: {in: [1, 2], iterator: n, spec: {mode: parallel, max_in_flight: "{{ %s }}"}}
          tool: {kind: noop}
        """
    root = "workload: {width: 3}\n"
    assert problems_of(steps % "ctx.width", root=root) == []
    assert problems_of(steps % "workload.width", root=root) == []
    [refused] = errors_of(steps % "iter.width", root=root)
    assert "max_in_flight is settled when the step is entered, and 'iter' is not known then" in refused
    [refused] = errors_of(steps % "workload.width - 3", root=root)
    assert "max_in_flight: input should be greater than or equal to 1, found 0" in refused


def _retried(retry: str) -> str:
    tool = "tool: {kind: postgres, auth: pg, command: SELECT 1}"
    return f"- step: start\n  {tool}\n  retry: {retry}\n  next: [{{step: take, on: call.partial}}]\n- step: take\n  {OK_TOOL}\n"


def test_a_retry_that_looks_at_results_keeps_a_stream_from_its_chunks() -> None:
    found = warnings_of(_retried("{max_attempts: 3, stop_when: '{{ output.data }}'}"))
    assert any("gives its result as one chunk, since its 'retry' looks at results" in one for one in found)
    assert not warnings_of(_retried("{max_attempts: 3, retry_on: [connection]}"))


def test_an_iterator_that_hides_a_name_of_the_language() -> None:
    [found] = warnings_of(f"- step: start\n  {OK_TOOL}\n  loop: {{in: [1], iterator: workload}}\n")
    assert "iterator 'workload' hides a name of the language" in found
