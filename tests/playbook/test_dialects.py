"""Every accepted spelling normalises to one model."""

from __future__ import annotations

import json
from textwrap import indent

import pytest

from noetl_dagster.playbook.loader import parse_playbook, parse_report
from noetl_dagster.playbook.models import (
    Backoff,
    CollectStrategy,
    Directive,
    Dispatch,
    FanoutEngine,
    LoopMode,
    ResultSpec,
    RoutingMode,
)
from noetl_dagster.settings import StoreTier
from tests.playbook.playbooks import errors_of, load, meaning, problems_of, step_of, task_of, warnings_of, with_steps

NEWER = """
- step: start
  input: {region: "{{ workload.region }}"}
  tool:
    - name: fetch
      kind: http
      url: "{{ workload.api }}/users"
      method: POST
      json: {page: "{{ iter.page }}"}
      input: {region: "{{ region }}"}
      auth: api
      spec:
        policy:
          rules:
            - when: "{{ output.status == 'error' }}"
              then:
                do: retry
                attempts: 5
                backoff: exponential
                delay: 2
                set: {iter.tries: 1, ctx.seen: true}
            - else: {then: {do: continue}}
    - name: store
      kind: postgres
      command: INSERT INTO t VALUES (1)
      auth: pg
      set: {ctx.stored: "{{ output.data.row_count }}"}
  loop: {in: "{{ workload.users }}", iterator: user, spec: {mode: parallel, max_in_flight: 8}}
  set: {ctx.total: "{{ output.total }}"}
  next:
    spec: {mode: exclusive}
    arcs:
      - {step: end, when: "{{ loop.failed == 0 }}", set: {ctx.ok: true}}
      - {step: start}
- step: end
  tool: {kind: noop}
"""

OLDER = """
- step: start
  desc: the same in older words
  args: {region: "{{ workload.region }}"}
  tool:
    - fetch:
        kind: http
        endpoint: "{{ workload.api }}/users"
        method: POST
        payload: {page: "{{ iter.page }}"}
        args: {region: "{{ region }}"}
        credential: api
        spec:
          policy:
            rules:
              - cond: "{{ output.status == 'error' }}"
                then:
                  do: retry
                  max_attempts: "5"
                  backoff: exponential
                  delay: 2s
                  set_iter: {tries: 1}
                  set_ctx: {seen: true}
              - else: {do: continue}
    - store:
        kind: postgres
        query: INSERT INTO t VALUES (1)
        credential: pg
        vars: {stored: "{{ output.data.row_count }}"}
  loop: {collection: "{{ workload.users }}", element: user, mode: async, concurrency: 8}
  vars: {total: "{{ output.total }}"}
  next:
    - {step: end, cond: "{{ loop.failed == 0 }}", set_ctx: {ok: true}}
    - {step: start}
- step: end
  tool: [{kind: noop}]
"""


def test_both_generations_of_words_mean_the_same() -> None:
    newer, older = meaning(load(NEWER)), meaning(load(OLDER))
    older["steps"][0]["description"] = ""
    assert older == newer


def test_shapes_of_tool() -> None:
    mapping = step_of("- step: start\n  tool: {kind: noop}")
    assert [(task.name, task.named) for task in mapping.tasks] == [("task_0", False)]
    unnamed = step_of("- step: start\n  tool: [{kind: noop}, {name: b, kind: noop}, {kind: noop}]")
    assert [(task.name, task.named) for task in unnamed.tasks] == [("task_0", False), ("b", True), ("task_2", False)]
    labelled = step_of("- step: start\n  tool: {a: {kind: noop}, b: {kind: noop}}")
    assert [task.name for task in labelled.tasks] == ["a", "b"]


SPELLINGS = (
    "noop input args",
    "playbook input args payload workload",
    "playbook path playbook task",
    "http url endpoint",
    "http json payload body data",
    "http timeout timeout_seconds timeout_s",
    "postgres command query commands sql",
    "duckdb command query commands sql",
    "postgres auth credential credentials",
    "transfer on_drift on_new_column",
    *(
        f"{kind} {words}"
        for kind in ("s3", "gcs")
        for words in (
            "operation action",
            "uri url",
            "key object keys blob object_name object_key",
            "source src",
            "destination dest target",
            "file path local_path file_path filename",
            "content data body value payload text",
            "limit max_keys max_results",
        )
    ),
)
"""A kind, and words for one of its fields, the canonical one first."""

NEEDS = {
    "playbook": {"path": "a"},
    "http": {"url": "x"},
    "transfer": {"source": {"table": "a"}, "target": {"table": "b"}},
}
VALUES = {"input": {"a": 1}, "json": {"a": 1}, "timeout": 5, "operation": "upload", "on_drift": "fail"}


@pytest.mark.parametrize("words", SPELLINGS)
def test_every_word_for_a_field_means_the_same(words: str) -> None:
    kind, canonical, *older = words.split()
    value, needs = VALUES.get(canonical, "x"), {"kind": kind, **NEEDS.get(kind, {})}
    needs |= {"command": "SELECT 1"} if canonical == "auth" else {}
    needs = {name: one for name, one in needs.items() if name != canonical}
    expected = task_of(json.dumps({**needs, canonical: value}))
    assert value in (expected.config.get(canonical), expected.input, expected.auth)
    for word in older:
        assert meaning(task_of(json.dumps({**needs, word: value}))) == meaning(expected), word


def test_the_name_of_a_child_playbook_is_its_path() -> None:
    assert task_of("{kind: playbook, name: a/b}").config["path"] == "a/b"


@pytest.mark.parametrize("field", ["on_new_column", "on_drift"])
def test_words_for_new_columns_of_a_sink(field: str) -> None:
    sink = task_of(f"{{kind: noop, sink: {{auth: a, table: t, {field}: add}}}}").sink
    assert sink is not None
    assert sink.on_new_column == "add"


def test_seeds_tool_beside_its_fields() -> None:
    task = step_of(
        """
        - step: fetch
          tool: http
          url: "{{ server_url }}{{ endpoint.path }}"
          params: {page: 1}
          loop: {collection: "{{ workload.endpoints }}", element: endpoint, mode: sequential}
          retry:
            - when: "{{ response.paging.hasMore }}"
              then:
                max_attempts: 10
                next_call: {params: {page: "{{ response.paging.page + 1 }}"}}
                collect: {strategy: append, path: data}
                sink:
                  tool: postgres
                  table: raw
                  auth: {type: postgres, credential: main_db}
                  mode: append
          sink: {tool: {kind: postgres, auth: main_db, table: pages}, args: {a: 1}}
        """
    ).tasks[0]
    assert task.kind == "http"
    assert task.config == {"url": "{{ server_url }}{{ endpoint.path }}", "params": {"page": 1}}
    rule = task.retry[0]
    assert rule.continues_success
    assert rule.max_attempts == 10
    assert rule.next_call is not None
    assert rule.next_call.params == {"page": "{{ response.paging.page + 1 }}"}
    assert rule.collect is not None
    assert (rule.collect.strategy, rule.collect.path) == (CollectStrategy.APPEND, "data")
    assert rule.sink is not None
    assert (rule.sink.table, rule.sink.auth) == ("raw", "main_db")
    assert task.sink is not None
    assert (task.sink.tool, task.sink.table, task.sink.auth, task.sink.args) == (
        "postgres",
        "pages",
        "main_db",
        {"a": 1},
    )


@pytest.mark.parametrize(
    ("written", "targets", "mode"),
    [
        ("next: end", ["end"], RoutingMode.EXCLUSIVE),
        ("next: [end]", ["end"], RoutingMode.EXCLUSIVE),
        ("next: [{step: end}]", ["end"], RoutingMode.EXCLUSIVE),
        ("next: {step: end}", ["end"], RoutingMode.EXCLUSIVE),
        ("next: [end, other]", ["end", "other"], RoutingMode.INCLUSIVE),
        ("next: [{step: end, when: true}, {step: other}]", ["end", "other"], RoutingMode.EXCLUSIVE),
        ("next: {arcs: [{step: end}]}", ["end"], RoutingMode.EXCLUSIVE),
        ("next: {spec: {mode: inclusive}, arcs: [end, other]}", ["end", "other"], RoutingMode.INCLUSIVE),
        ("next: []", [], RoutingMode.EXCLUSIVE),
        ("next:", [], RoutingMode.EXCLUSIVE),
    ],
)
def test_shapes_of_next(written: str, targets: list[str], mode: RoutingMode) -> None:
    more = "- step: end\n  tool: {kind: noop}\n- step: other\n  tool: {kind: noop}"
    routing = load(f"- step: start\n  tool: {{kind: noop}}\n  {written}\n{more}").steps[0].routing
    assert [arc.step for arc in routing.arcs] == targets
    assert routing.mode is mode


def test_on_of_an_arc_is_a_word_not_a_boolean() -> None:
    step = step_of("- step: start\n  tool: {kind: noop}\n  next: {arcs: [{step: start, on: step.done}]}")
    assert step.routing.arcs[0].on == "step.done"


@pytest.mark.parametrize(
    ("arcs", "loop", "iterator", "in_flight"),
    [
        ("{arcs: [{step: take, on: call.partial}]}", "", "chunk", 1),
        ("{step: take, on: call.partial}", "loop: {iterator: page}", "page", 1),
        ("[{step: take, on: call.partial}]", "loop: {mode: stream, concurrency: 3}", "chunk", 3),
        ("[{step: take, on: call.partial}]", "loop: {spec: {max_in_flight: 4}}", "chunk", 4),
    ],
)
def test_a_step_that_takes_chunks_is_a_loop_over_them(arcs: str, loop: str, iterator: str, in_flight: int) -> None:
    text = f"- step: start\n  tool: {{kind: noop}}\n  next: {arcs}\n- step: take\n  tool: {{kind: noop}}\n  {loop}"
    found = load(text).steps[1].loop
    assert found is not None
    assert (found.mode, found.iterator, found.max_in_flight) == (LoopMode.STREAM, iterator, in_flight)


def test_arguments_of_an_arc_are_set_before_its_target() -> None:
    step = step_of("- step: start\n  tool: {kind: noop}\n  next: [{step: start, args: {id: 1}}]")
    assert step.routing.arcs[0].set == {"ctx.id": 1}


def test_a_form_by_its_word_or_by_its_header() -> None:
    assert task_of("kind: http\nurl: x\nform: {a: 1}").config["form"] == {"a": 1}
    by_header = task_of("kind: http\nurl: x\nheaders: {content-type: application/x-www-form-urlencoded}\ndata: {a: 1}")
    assert by_header.config["form"] == {"a": 1}
    assert "json" not in by_header.config


def test_names_of_workbook_tasks() -> None:
    root = "workbook:\n  - {name: greet, tool: {kind: python, code: 'result = 1'}}\n"
    steps = "- step: start\n  tool: {kind: workbook, name: greet, args: {a: 1}}"
    playbook = load(steps, root=root)
    assert playbook.steps[0].tasks[0].config == {"task": "greet"}
    assert playbook.workbook["greet"].kind == "python"
    mapping = load(steps, root="workbook:\n  greet: {kind: python, code: 'result = 1'}\n")
    assert meaning(mapping)["workbook"] == meaning(playbook)["workbook"]


def test_a_workbook_task_may_have_a_name_of_its_own() -> None:
    root = "workbook: {greet: {kind: noop}}\n"
    steps = "- step: start\n  tool: [{name: first, kind: workbook, task: greet}]"
    task = load(steps, root=root).steps[0].tasks[0]
    assert (task.name, task.config) == ("first", {"task": "greet"})


def test_input_under_two_spellings_is_merged() -> None:
    task = task_of("kind: noop\ninput: {a: 1}\nargs: {a: 2, b: 3}")
    assert task.input == {"a": 1, "b": 3}


PAGED = "kind: http\nurl: http://x/\n"


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ("{link: next, curser: x}", "unknown key 'curser'; did you mean 'cursor'?"),
        ("{link: next, next: x}", "one of link, next, cursor, number, offset is needed"),
        ("{cursor: next}", "'param' is missing"),
        ("{number: page}", "'rows' is missing: the path of the rows in the body, or response"),
        ("{number: page, until: x}", "until must be one template"),
        ("{link: next, until: '{{ response.last }}'}", "unknown key 'until'"),
        ("{link: next}\nretry: {when: true, then: {collect: {path: x}}}", "'pages' and a rule of 'retry' both say"),
    ],
)
def test_pages_that_cannot_be_read_are_named(pages: str, message: str) -> None:
    task = indent(f"{PAGED}pages: {pages}", "    ")
    assert any(message in problem for problem in errors_of(f"- step: fetch\n  tool:\n{task}")), message


def test_pages_are_a_rule_beside_the_retry_of_the_step() -> None:
    task = f"{PAGED}params: {{page: '{{{{ first }}}}'}}\npages: {{number: page, rows: data, max_pages: 7, delay: 2s}}"
    steps = f"- step: fetch\n  retry: 4\n  tool:\n{indent(task, '    ')}"
    pages, failures = step_of(steps).tasks[0].retry
    assert (pages.max_attempts, pages.delay, failures.max_attempts) == (7, 2, 4)
    assert pages.next_call is not None
    assert pages.next_call.params == {"page": "{{ (first | int) + _page }}"}


def test_retry_as_one_mapping() -> None:
    rule = task_of("kind: noop\nretry: {max_attempts: 4, initial_delay: 2, backoff_multiplier: 2.0}").retry[0]
    assert (rule.when, rule.max_attempts, rule.delay) == ("{{ error is defined }}", 4, 2.0)
    assert rule.backoff is Backoff.EXPONENTIAL


def test_selected_fields() -> None:
    assert kept("output_select: [total, $.paging.page, 'rows[0].id']").select == ("total", "paging.page", "rows.0.id")
    assert kept("spec: {result: {select: [{path: $.count, as: count}]}}").select == ("count",)


def kept(fields: str) -> ResultSpec:
    return task_of(f"kind: noop\n{fields}").spec.result


def test_an_output_of_storage_words_keeps_the_result_as_it_is() -> None:
    task = task_of("kind: noop\noutput: {output_select: [n], store: {kind: kv, ttl: 2h}, name: rows}")
    assert task.output is None
    assert task.spec.result == ResultSpec(store=StoreTier.KV, select=("n",), name="rows", ttl=7200)
    assert kept("output: {store: {kind: auto}}") == ResultSpec()
    assert kept("output: {output_select: {strategy: size_threshold, threshold_kb: 2}}").threshold == 2048


def test_what_stands_nearer_to_the_result_says_how_it_is_kept() -> None:
    own = "output_select: [a]\nspec: {result: {select: [b], store: pvc, name: x}}\noutput: {store: kv}"
    assert kept(own) == ResultSpec(store=StoreTier.KV, select=("a",), name="x")


def test_a_steps_output_of_storage_words_is_about_its_last_task() -> None:
    step = (
        "- step: start\n  output: {output_select: [n], store: pvc}\n"
        "  tool: [{kind: noop}, {kind: noop, spec: {result: {store: kv}}}]"
    )
    [start] = load(step).steps
    assert start.output is None
    assert [task.spec.result for task in start.tasks] == [ResultSpec(), ResultSpec(store=StoreTier.KV, select=("n",))]


@pytest.mark.parametrize(
    "output", ["{name: '{{ output.name }}'}", "{store: '{{ output.shop }}'}", "{store: pvc, rows: 1}"]
)
def test_an_output_of_other_words_is_a_result(output: str) -> None:
    assert task_of(f"kind: noop\noutput: {output}").output is not None


def test_the_innermost_loop_mode_wins() -> None:
    executor = "executor: {spec: {loop_mode: fanout}}\n"
    loop = "- step: start\n  tool: {kind: noop}\n  loop: {in: [1], mode: sequential}"
    own = load(loop, root=executor).steps[0].loop
    assert own is not None
    assert own.mode is LoopMode.SEQUENTIAL
    forced = load(loop + "\n  spec: {loop_mode: fanout}", root=executor).steps[0].loop
    assert forced is not None
    assert forced.mode is LoopMode.FANOUT


def test_loop_words_and_defaults() -> None:
    loop = step_of("- step: start\n  tool: {kind: noop}\n  loop: {in: [1]}").loop
    assert loop is not None
    assert (loop.iterator, loop.mode, loop.max_in_flight) == ("item", LoopMode.SEQUENTIAL, 16)
    chunked = step_of("- step: s\n  tool: {kind: noop}\n  loop: {in: [1], mode: chunked, chunk_size: 5}").loop
    assert chunked is not None
    assert (chunked.mode, chunked.chunk_size) == (LoopMode.CHUNKED, 5)


def test_cursor() -> None:
    loop = step_of(
        """
        - step: drain
          tool: {kind: noop}
          loop:
            cursor: {kind: postgres, auth: pg, claim: "SELECT 1 LIMIT {{ __frame_max_rows }}"}
            iterator: row
            spec:
              mode: cursor
              max_in_flight: 4
              frame: {max_rows: 50, max_seconds: 1m, lease_seconds: 30, row_concurrency: 2}
        """
    ).loop
    assert loop is not None
    assert loop.mode is LoopMode.CURSOR
    assert loop.cursor is not None
    assert loop.cursor.auth == "pg"
    assert (loop.frame.max_rows, loop.frame.max_seconds, loop.frame.row_concurrency) == (50, 60.0, 2)


def test_fanout_of_a_step_and_of_the_executor() -> None:
    steps = """
        - step: spread
          tool: {kind: noop}
          loop: {in: [1], iterator: item}
          spec: {fanout: {engine: workers, max_groups: 4, iter_key: "{{ item.id }}", shard_ttl: 1h}}
        - step: plain
          tool: {kind: noop}
        """
    playbook = load(steps, root="executor: {profile: local, spec: {loop_mode: fanout}}\n")
    spread, plain = playbook.steps
    assert spread.is_fanout
    assert not plain.is_fanout
    assert spread.loop is not None
    fanout = spread.loop.fanout
    assert (fanout.engine, fanout.max_groups, fanout.shard_ttl) == (FanoutEngine.WORKERS, 4, 3600.0)


def test_spec_is_layered_from_the_executor_to_the_task() -> None:
    playbook = load(
        """
        - step: start
          spec: {timeout: 20, result: {store: pvc}, dispatch: workers, strict_ctx: true, isolation: subprocess}
          loop: {in: [1], spec: {mode: parallel, result: {ttl: 1h}}}
          tool:
            - {name: a, kind: noop}
            - {name: b, kind: noop, spec: {timeout: {connect: 1, read: 2}, result: {store: {kind: auto}}}}
        """,
        root="executor: {spec: {timeout: 5, retries: 7, result: {compression: gzip}}}\n",
    )
    step = playbook.steps[0]
    a, b = step.tasks
    assert a.spec.timeout == 20
    assert (a.spec.result.store, a.spec.result.compression, a.spec.result.ttl) == (StoreTier.PVC, "gzip", 3600.0)
    assert a.spec.options == {"retries": 7, "isolation": "subprocess"}
    assert b.spec.timeout == 3
    assert b.spec.result.store is None
    assert step.spec.dispatch is Dispatch.WORKERS
    assert step.spec.strict_ctx


def test_a_spec_of_the_playbook_is_the_outermost_layer() -> None:
    playbook = load(
        """
        - step: start
          tool: {kind: noop}
        - step: near
          spec: {timeout: 3}
          tool: {kind: noop, spec: {on_error: fail}}
        """,
        root="""
        spec: {timeout: 1, retry: 5, on_error: continue}
        executor: {spec: {timeout: 2}}
        """,
    )
    start, near = playbook.steps
    assert (start.tasks[0].spec.timeout, near.tasks[0].spec.timeout) == (2, 3)
    assert [rule.then.do for step in playbook.steps for rule in step.tasks[0].spec.policy] == ["continue", "fail"]
    assert [rule.max_attempts for rule in start.tasks[0].retry] == [5]
    assert not near.tasks[0].retry, "it says itself what follows an error"
    assert start.tasks[0].spec.options == {}


@pytest.mark.parametrize(
    ("task", "attempts"),
    [
        ("{kind: noop}", 4),
        ("{kind: noop, retry: 2}", 2),
        ("{kind: noop}\n  retry: 3", 3),
        ("{kind: noop, spec: {policy: {rules: [{when: false, then: {do: retry}}]}}}", None),
        ("[{name: a, kind: noop, retry: 2}, {name: b, kind: noop}]", None),
    ],
)
@pytest.mark.parametrize("root", ["spec: {retry: 4}\n", "executor: {spec: {retry: {max_attempts: 4}}}\n"])
def test_retry_of_a_spec_is_for_steps_that_say_nothing_themselves(task: str, attempts: int | None, root: str) -> None:
    last = step_of(f"- step: start\n  tool: {task}", root=root).tasks[-1]
    assert [rule.max_attempts for rule in last.retry] == ([] if attempts is None else [attempts])


def test_an_else_rule_decides_before_on_error_of_an_outer_spec() -> None:
    rules = "policy: {rules: [{when: true, then: {do: break}}, {else: {then: {do: fail}}}]}"
    for spec, expected in (
        (f"{{{rules}}}", ["break", "fail"]),
        (f"{{{rules}, on_error: {{do: retry}}}}", ["break", "retry", "fail"]),
    ):
        step = step_of(f"- step: a\n  tool: {{kind: noop, spec: {spec}}}", root="spec: {on_error: continue}\n")
        assert [rule.then.do for rule in step.tasks[0].spec.policy] == expected


@pytest.mark.parametrize(
    ("written", "delay", "backoff"),
    [
        ("backoff: 5", 5, Backoff.NONE),
        ("backoff: '0.5'", 0.5, Backoff.NONE),
        ("backoff: 500ms", 0.5, Backoff.NONE),
        ('backoff: "{{ workload.pause }}"', 7, Backoff.NONE),
        ('backoff: "{{ workload.word }}", delay: 2', 2, Backoff.LINEAR),
        ("backoff: exponential, delay: 3", 3, Backoff.EXPONENTIAL),
        ("delay_seconds: 3", 3, Backoff.NONE),
    ],
)
def test_a_number_as_backoff_is_a_constant_delay(written: str, delay: float, backoff: Backoff) -> None:
    playbook = load(
        f"""
        - step: start
          tool:
            kind: noop
            spec: {{policy: [{{when: true, then: {{do: retry, {written}}}}}]}}
            retry: [{{when: true, then: {{max_attempts: 2, {written}}}}}]
        - step: flat
          tool: {{kind: noop, retry: {{max_attempts: 2, retry_on: [http], {written}}}}}
        """,
        root="workload: {pause: 7, word: linear}\n",
    )
    task, flat = (step.tasks[0] for step in playbook.steps)
    for found in (task.spec.policy[0].then, task.retry[0], flat.retry[0]):
        assert (found.delay, found.backoff) == (delay, backoff)


def test_admission_rules_become_one_template() -> None:
    step = step_of(
        """
        - step: start
          tool: {kind: noop}
          spec:
            policy:
              admit:
                rules:
                  - {when: "{{ ctx.ready }}", then: {allow: true}}
                  - else: {then: {allow: false}}
        """
    )
    assert step.spec.admit == "{{ true if (ctx.ready) else false }}"


def test_policy_defaults_and_else_last() -> None:
    rules = task_of(
        """
        kind: noop
        spec:
          policy:
            rules:
              - else: {then: {set_ctx: {a: 1}}}
              - when: true
                then: {do: retry, backoff: fixed}
        """
    ).spec.policy
    assert [rule.when for rule in rules] == [True, None]
    assert (rules[0].then.attempts, rules[0].then.delay, rules[0].then.backoff) == (3, 1.0, Backoff.NONE)
    assert (rules[1].then.do, rules[1].then.set) == (Directive.CONTINUE, {"ctx.a": 1})


def test_settings_may_be_templates_of_the_workload() -> None:
    steps = """
        - step: start
          tool: {kind: noop}
          loop: {in: [1], spec: {mode: parallel, max_in_flight: "{{ workload.width }}"}}
        """
    playbook = load(steps, root="workload: {width: 12}\n")
    assert playbook.steps[0].loop is not None
    assert playbook.steps[0].loop.max_in_flight == 12
    again = parse_playbook(playbook.source, workload={"width": "3"})
    assert again.steps[0].loop is not None
    assert again.steps[0].loop.max_in_flight == 3
    assert playbook.settled
    assert again.workload == {"width": 12}
    assert errors_of(steps) == []
    assert "max_in_flight must come with the workload of the execution" in warnings_of(steps)[0]


def test_settings_may_be_templates_over_ctx() -> None:
    """They are known by where they stand; tasks without names that say different things have a number."""
    step = step_of(
        """
        - step: start
          spec: {timeout: "{{ ctx.patience }}"}
          tool:
            - {kind: noop, spec: {timeout: "{{ ctx.a }}"}}
            - {kind: noop, spec: {timeout: "{{ ctx.b }}"}}
            - name: last
              kind: noop
              retry: {max_attempts: "{{ ctx.tries }}", delay: "{{ ctx.pause }}s"}
              spec:
                policy:
                  rules:
                    - {when: "{{ output.status == 'error' }}", then: {do: retry, attempts: "{{ ctx.tries }}"}}
          loop:
            in: [1]
            spec: {mode: parallel, fail_fast: "{{ ctx.strict }}", frame: {max_rows: "{% if ctx.a %}5{% endif %}"}}
        """
    )
    assert step.settings == {
        "loop.spec.fail_fast": "{{ ctx.strict }}",
        "loop.spec.frame.max_rows": "{% if ctx.a %}5{% endif %}",
        "spec.timeout": "{{ ctx.a }}",
        "spec.timeout (2)": "{{ ctx.b }}",
        "task 'last'.spec.timeout": "{{ ctx.patience }}",
        "task 'last'.spec.policy.rule 1.then.attempts": "{{ ctx.tries }}",
        "task 'last'.retry rule 1.max_attempts": "{{ ctx.tries }}",
        "task 'last'.retry rule 1.delay": "{{ ctx.pause }}s",
    }


def test_nested_set_and_bare_names() -> None:
    step = step_of("- step: start\n  tool: {kind: noop}\n  set: {ctx: {a: 1}, b: 2, iter.c: 3}")
    assert step.set == {"ctx.a": 1, "b": 2, "iter.c": 3}


def test_metadata_is_forgiving() -> None:
    text = "apiVersion: noetl.io/v2\nkind: Playbook\n{}workflow: [{{step: a, tool: {{kind: noop}}}}]\n"
    bare = parse_playbook(text.format(""), file="flows/daily.yaml").metadata
    assert (bare.name, bare.path) == ("daily", "daily")
    full = parse_playbook(
        text.format("metadata: {path: a/b, version: 1.5, tags: 'x, y', owners: [z], labels: {k: v}, agent: true}\n")
    ).metadata
    assert (full.name, full.path, full.version, full.tags, full.owners) == ("b", "a/b", "1.5", ("x", "y"), ("z",))


def test_a_playbook_without_a_path_has_its_name_as_path() -> None:
    text = (
        "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: daily}\nworkflow: [{step: a, tool: {kind: noop}}]\n"
    )
    playbook, problems = parse_report(text, file="flows/other.yaml")
    assert playbook is not None
    assert playbook.metadata.path == "daily"
    assert [str(problem) for problem in problems] == [
        "flows/other.yaml:3:11: warning: playbook, metadata: 'path' is missing; the playbook's path is its name, 'daily'"
    ]


def test_keychain_as_list_or_mapping() -> None:
    steps = "- step: start\n  tool: {kind: noop}"
    listed = load(steps, root="keychain: [{name: api, kind: bearer}]\n")
    mapped = load(steps, root="keychain: {api: {kind: bearer}}\n")
    assert listed.keychain == mapped.keychain == ({"name": "api", "kind": "bearer"},)


def test_yaml_anchors_and_merge_keys() -> None:
    playbook = load(
        """
        - step: start
          tool: &http {kind: http, url: x, method: GET}
          next: [end]
        - step: end
          tool:
            <<: *http
            method: POST
        """
    )
    assert [step.tasks[0].config["method"] for step in playbook.steps] == ["GET", "POST"]


def test_dates_and_odd_keys_stay_text() -> None:
    playbook = load("- step: start\n  tool: {kind: noop}", root="workload: {day: 2024-01-31, on: 1, 5: x}\n")
    assert playbook.workload == {"day": "2024-01-31", "on": 1, "5": "x"}


def test_entry_is_start_wherever_it_stands() -> None:
    playbook = load("- step: other\n  tool: {kind: noop}\n- step: start\n  tool: {kind: noop}\n  next: other")
    assert playbook.entry.name == "start"
    assert playbook.step("other").name == "other"
    with pytest.raises(KeyError):
        playbook.step("nope")


def test_what_is_wrong_in_a_spec_is_told_where_it_stands() -> None:
    steps = """
    - step: start
      spec:
        dispatch: worker
        timeout: soon
      tool: {kind: noop}
      next: [two]
    - step: two
      tool: {kind: noop, spec: {result: {ttl: soon}}}
    """
    root = "executor:\n  spec:\n    priority: high\n"
    found = [(problem.place.line, problem.message) for problem in problems_of(steps, root=root)]
    text = with_steps(steps, root=root).splitlines()
    lines = [text[line - 1].strip() for line, _ in found]
    assert lines[:3] == ["priority: high", "dispatch: worker", "timeout: soon"]
    assert found[0][1].startswith("executor, spec: priority must be a number")
    assert len({line for line, _ in found}) == len(found), "once each"


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (
            "executor: {kubernetes: {cpu: 1}}",
            "executor: 'kubernetes' has no effect here; write spec: {kubernetes: ...}",
        ),
        ("executor: {spec: {entry_step: a}}", "executor, spec: 'entry_step' has no effect; known keys: loop_mode"),
        ("spec: {next_mode: inclusive}", "playbook, spec: 'next_mode' has no effect; known keys: policy, timeout"),
    ],
)
def test_words_of_the_executor_that_nobody_reads(root: str, message: str) -> None:
    [warning] = warnings_of("- {step: a, tool: {kind: noop}}", root=f"{root}\n")
    assert message in warning
