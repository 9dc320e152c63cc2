"""Playbooks in older words, rewritten: they mean the same, and keep all that their authors wrote around the words."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.migration.rewriting import Migration, migrate
from tests.playbook.playbooks import HEAD, meaning, with_steps

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CORPUS = [path for path in find_playbooks(ROOT / "tests" / "corpus") if not path.stem.startswith("refused")]
OTHERS = [*find_playbooks(ROOT / "playbooks"), *find_playbooks(ROOT / "examples")]


def rewritten(steps: str, *, root: str = "") -> str:
    """The workflow of a playbook in today's words; it means the same, and nothing is left to rewrite."""
    text = with_steps(steps, root=root)
    migration = migrate(text, "sample.yaml")
    assert migration.problems == ()
    assert_same(text, migration)
    return dedent(migration.text.partition("workflow:\n")[2])


def assert_same(text: str, migration: Migration) -> None:
    assert meaning(parse_playbook(migration.text)) == meaning(parse_playbook(text))
    assert migrate(migration.text, "sample.yaml").text == migration.text


@pytest.mark.parametrize("path", [*CORPUS, *OTHERS], ids=lambda path: path.stem)
def test_a_rewritten_playbook_is_the_same_playbook(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    migration = migrate(text, str(path))
    assert migration.problems == ()
    assert_same(text, migration)


CASES = {
    "fields": (
        "- step: a\n  args: {x: 1}\n  tool: {kind: http, endpoint: u, payload: {a: 1}, credential: c}\n",
        "- step: a\n  input: {x: 1}\n  tool: {kind: http, url: u, json: {a: 1}, auth: c}\n",
    ),
    "sql": ("- step: a\n  tool:\n    kind: duckdb\n    query: |\n      SELECT 1\n",
            "- step: a\n  tool:\n    kind: duckdb\n    command: |\n      SELECT 1\n"),
    "fields below spec": (
        "- step: a\n  tool:\n    kind: python\n    spec:\n      args: {b: 1}\n      code: a = 1\n      timeout: 5\n",
        "- step: a\n  tool:\n    kind: python\n    input: {b: 1}\n    code: a = 1\n    spec:\n      timeout: 5\n",
    ),
    "only fields below spec": (
        "- step: a\n  tool: {kind: python, spec: {code: a = 1}}\n",
        "- step: a\n  tool: {kind: python, code: a = 1}\n",
    ),
    "labels": (
        "- step: a\n  tool:\n    - one:\n        kind: noop\n    - two: {kind: noop}\n",
        "- step: a\n  tool:\n    - name: one\n      kind: noop\n    - {name: two, kind: noop}\n",
    ),
    "labels of a mapping": (
        "- step: a\n  tool:\n    one: {kind: noop}\n    two: {kind: noop}\n",
        "- step: a\n  tool:\n    - {name: one, kind: noop}\n    - {name: two, kind: noop}\n",
    ),
    "one label": (
        "- step: a\n  tool: {one: {kind: noop}}\n", "- step: a\n  tool: {name: one, kind: noop}\n"),
    "a name beside its fields": (
        "- step: a\n  tool: http\n  url: u\n  method: POST\n  set: {ctx.a: 1}\n",
        "- step: a\n  tool:\n    kind: http\n    url: u\n    method: POST\n  set: {ctx.a: 1}\n",
    ),
    "set blocks": (
        "- step: a\n  tool: {kind: noop}\n  vars:\n    x: 1\n  set_ctx: {y: 2, iter.z: 3}\n",
        "- step: a\n  tool: {kind: noop}\n  set:\n    ctx.x: 1\n    ctx.y: 2\n    iter.z: 3\n",
    ),
    "loop": (
        "- step: a\n  tool: {kind: noop}\n  loop:\n    collection: [1]\n    element: x\n    mode: async\n"
        "    concurrency: 4\n",
        "- step: a\n  tool: {kind: noop}\n  loop:\n    in: [1]\n    iterator: x\n"
        "    spec: {mode: parallel, max_in_flight: 4}\n",
    ),
    "loop with a spec": (
        "- step: a\n  tool: {kind: noop}\n  loop: {in: [1], iterator: x, chunk_size: 2, spec: {mode: chunked}}\n",
        "- step: a\n  tool: {kind: noop}\n  loop: {in: [1], iterator: x, spec: {mode: chunked, chunk_size: 2}}\n",
    ),
    "arcs": (
        "- step: a\n  tool: {kind: noop}\n  next:\n    - step: a\n      cond: '{{ ctx.b }}'\n      args: {c: 1}\n",
        "- step: a\n  tool: {kind: noop}\n  next:\n    arcs:\n      - step: a\n        when: '{{ ctx.b }}'\n"
        "        input: {c: 1}\n",
    ),
    "arcs without conditions": (
        "- step: a\n  tool: {kind: noop}\n  next: [{step: a}, b]\n- step: b\n  tool: {kind: noop}\n",
        "- step: a\n  tool: {kind: noop}\n  next: {spec: {mode: inclusive}, arcs: [{step: a}, b]}\n"
        "- step: b\n  tool: {kind: noop}\n",
    ),
    "names of steps are short for arcs": (
        "- step: a\n  tool: {kind: noop}\n  next: [a]\n", "- step: a\n  tool: {kind: noop}\n  next: [a]\n"),
    "policy": (
        "- step: a\n  tool:\n    kind: noop\n    spec:\n      policy:\n        - cond: true\n"
        "          then: {do: retry, max_attempts: 2, initial_delay: 1, backoff: fixed, set_ctx: {x: 1}}\n"
        "        - else: {do: fail}\n",
        "- step: a\n  tool:\n    kind: noop\n    spec:\n      policy:\n        rules:\n          - when: true\n"
        "            then: {do: retry, attempts: 2, delay: 1, backoff: none, set: {ctx.x: 1}}\n"
        "          - else: {then: {do: fail}}\n",
    ),
    "retry": (
        "- step: a\n  tool: {kind: noop}\n  retry: [{when: true, then: {attempts: 2, delay_seconds: 1, "
        "next_call: {endpoint: u, payload: {a: 1}}}}]\n",
        "- step: a\n  tool: {kind: noop}\n  retry: [{when: true, then: {max_attempts: 2, delay: 1, "
        "next_call: {url: u, body: {a: 1}}}}]\n",
    ),
    "sink": (
        "- step: a\n  tool: {kind: noop}\n  sink: {tool: {kind: postgres, credential: c, table: t}, keys: [k]}\n",
        "- step: a\n  tool: {kind: noop}\n  sink: {tool: postgres, auth: c, table: t, key: [k]}\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("older", "newer"), CASES.values(), ids=CASES)
def test_what_becomes_of_older_words(older: str, newer: str) -> None:
    assert rewritten(older) == newer


def test_workbook_tasks_are_rewritten_too() -> None:
    text = HEAD + dedent(
        """
        workbook:
          tasks:
            add: {kind: python, args: {a: 1}, code: result = a}
        workflow:
          - step: start
            tool: {call: {kind: workbook, spec: {name: add}}}
        """
    )
    migration = migrate(text, "sample.yaml")
    assert_same(text, migration)
    assert "add: {kind: python, input: {a: 1}, code: result = a}" in migration.text
    assert "tool: {name: call, kind: workbook, task: add}" in migration.text


STYLED = (
    HEAD
    + """
# who wrote this
workload:
    on:   yes            # as it was
    nothing: ~
    day: 2026-01-31
    list: [1, 2,
           3]

workflow:
- step: start   # the first
  # what it does
  tool:
      kind: python
      args: {'a': "1",   b: 017}   # two

      code: |
          # not a comment of YAML

          result = a
  next: [start]
"""
)


def test_all_but_the_words_stays_as_it_is() -> None:
    migration = migrate(STYLED, "sample.yaml")
    assert_same(STYLED, migration)
    before, after = STYLED.partition("- step: start"), migration.text.partition("- step: start")
    assert after[0] == before[0]
    assert after[2] == before[2].replace("""args: {'a': "1",   b: 017}   #""", """input: {'a': "1",   b: 017}  #""")


def test_comments_move_with_what_they_are_about() -> None:
    text = with_steps(
        """
        - step: start
          tool:
            - fetch:   # the call
                kind: http
                # where
                endpoint: u   # there
          vars:
            # once
            a: 1   # one
        """
    )
    migration = migrate(text, "sample.yaml")
    assert migration.problems == ()
    assert_same(text, migration)
    for comment in ("# the call", "# where", "# there", "# once", "# one"):
        assert migration.text.count(comment) == 1


def test_anchors_and_merges_stay() -> None:
    text = HEAD + dedent(
        """
        workflow:
          - step: a
            tool: &call
              kind: http
              endpoint: u
            next: [b]
          - step: b
            tool:
              <<: *call
              method: POST
              payload: {a: 1}
            next: [c]
          - step: c
            tool: *call
        """
    )
    migration = migrate(text, "sample.yaml")
    assert_same(text, migration)
    assert migration.text == text.replace("endpoint", "url").replace("payload", "json")


def test_ends_of_lines_stay() -> None:
    text = with_steps("- step: a\n  tool: {kind: http, endpoint: u}\n").replace("\n", "\r\n")
    assert migrate(text, "sample.yaml").text == text.replace("endpoint", "url")


LAYOUTS = {
    "any indentation": (
        """
        workload:
              a: 1
              b:
                 - 1
                 -   2
        workflow:
           -   step: a
        <      args:
        >      input:
                     z: 1
                     y:   2
               tool:
                    kind: http
        <           endpoint: u
        >           url: u
                    headers:   {a: 1,   b: 2}
           -
               step: b
               tool:  {kind: noop }
        """
    ),
    "comments, blank lines and blanks at ends": (
        """
        workflow:
          # the first
          - step: a   # its name
            # what goes in
        <   args: {b: 1}   # one
        >   input: {b: 1}  # one

            tool:   # by hand
              # nothing
              kind:   noop

            next: [ b ]
          # the second

          - step: b    # ends
          # no more
        """
    ),
    "quotes, long lines and numbers": (
        f"""
        workload: {{day: 2026-01-31, on: yes, octal: 017, 'x': "{'y' * 150}", text: 'it''s'}}
        workflow:
        - step: a
          desc: this text
            goes on
          tool:
            kind: http
        <   'endpoint': "http://{'x' * 150}/{{{{ workload.x }}}}"
        >   'url': "http://{'x' * 150}/{{{{ workload.x }}}}"
            params: {{"a": 'b',c: "d\\
              e"}}
        """
    ),
    "brackets on several lines": (
        """
        workflow:
        - {step: a,
        <  args: {b: 1,
        >  input: {b: 1,
                  c: [1,
                      2]},
        <  tool: {kind: http,   endpoint: u}}
        >  tool: {kind: http,   url: u}}
        """
    ),
    "block scalars": (
        """
        workflow:
        - step: a
          tool:
            kind: python
        <   args: {b: 1}
        >   input: {b: 1}
            code: |2+
                # no comment
              result = b


        - step: b
          tool:
            kind: duckdb
        <   query: >-   # folded
        >   command: >-   # folded
               SELECT 1,

                 2
        """
    ),
    "what is nested deeper moves, and nothing else": (
        """
        workflow:
            - step: a
              tool: {kind:  noop}
              next:   # whither
        <         - step: b    # there
        <           cond: "{{ ctx.x }}"
        <         # or
        <         - {step:  c}
        >         arcs:
        >             - step: b    # there
        >               when: "{{ ctx.x }}"
        >             # or
        >             - {step:  c}
            - step: b
              tool: {kind:  noop}
            - step:   c
        """
    ),
    "fields below spec": (
        """
        workflow:
        - step: a
          tool:
              kind: python   # slowly
        >     # what
        >     code: |
        >         result = 1
        >
        >           # more
              spec:
        <         # what
        <         code: |
        <             result = 1
        <
        <               # more
                  timeout:  5
        """
    ),
    "labels, with comments at every place": (
        """
        workflow:
        - step: a
          tool:
            # first
        <   - one:   # the call
        <       # how
        <       kind:  noop   # not at all
        >   - name: one   # the call
        >     # how
        >     kind:  noop   # not at all

            # second
        <   - two: {kind:  noop}    # nor this
        >   - {name: two, kind:  noop} # nor this
        """
    ),
    "what the comments of blocks that are gone were about": (
        """
        workflow:
        - step: a
          tool: {kind: noop}
          # first
        < vars: {x:  1}   # one
        < # second
        < set_ctx:   # two
        <   y:  2   # three
        > set:            # one
        >   ctx.x:  1
        >   # second
        >   # two
        >   ctx.y:  2 # three
          sink:
            # where
        <   tool:   # rows
        <     # kind
        <     kind:  postgres   # of server
        <     table:  t
        >   # kind
        >   # rows
        >   tool: postgres      # of server
        >   table:  t
            key: [x]
        """
    ),
    "a tool beside its fields": (
        """
        workflow:
        - step: a
        < tool: http   # calls
        < # where
        < url:  u   # there
        > tool:        # calls
        >   kind: http
        >   # where
        >   url:  u   # there

          set: {ctx.a: 1}
        """
    ),
    "anchors": (
        """
        workflow:
        - step: a
          tool: &call   # used again
            kind:  http
        <   endpoint: u
        >   url: u
        < next: &then
        <   - step:  b
        > next:
        >   arcs: &then
        >     - step:  b
        - step: b
          tool:
            <<:  *call
        <   payload: {a:  1}
        >   json: {a:  1}
        < next: *then
        > next:
        >   arcs: *then
        """
    ),
    "settings of a loop": (
        """
        workflow:
        - step: a
          tool: {kind: noop}
          loop:
        <     collection: [1]   # all
        <     element:  x
        <     mode: async
        <     concurrency:  4
        >     in: [1]           # all
        >     iterator:  x
        >     spec: {mode: parallel, max_in_flight:  4}
        """
    ),
}  # fmt: skip


def sides(changes: str) -> tuple[str, str]:
    """The texts before and after changes: ``<`` marks a line that goes, ``>`` one that comes; the others stay."""
    lines = dedent(changes).strip("\n").split("\n")
    texts = [[" " * (line[:1] in "<>") + line.lstrip("<>") for line in lines if line[:1] != mark] for mark in "><"]
    before, after = (
        HEAD + "".join(f"{line.rstrip() if line.isspace() else line}\n" for line in text) for text in texts
    )
    return before, after


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_only_the_lines_that_have_to_change_do(changes: str) -> None:
    before, after = sides(changes)
    migration = migrate(before, "sample.yaml")
    assert migration.problems == ()
    assert_same(before, migration)
    assert migration.text == after
    crlf = migrate(before.replace("\n", "\r\n"), "sample.yaml")
    assert crlf.text == after.replace("\n", "\r\n")


def test_a_playbook_with_errors_stays_as_it_is() -> None:
    text = with_steps("- step: a\n  args: {b: 1}\n  tool: {kind: noop}\n  next: b\n")
    migration = migrate(text, "sample.yaml")
    assert migration.text == text
    assert "unknown step 'b'" in migration.problems[0].message


def test_keys_that_are_not_understood_stay_and_are_reported() -> None:
    text = with_steps("- step: a\n  args: {b: 1}\n  tool: {kind: noop}\n  nexxt: b\n")
    migration = migrate(text, "sample.yaml")
    assert migration.text == text.replace("args", "input")
    [problem] = migration.problems
    assert (problem.severity, "unknown key 'nexxt'" in problem.message) == ("warning", True)


def test_what_is_not_supported_here_is_rewritten_all_the_same() -> None:
    text = with_steps("- step: a\n  args: {b: 1}\n  tool: {kind: oracle, endpoint: u}\n")
    assert migrate(text, "sample.yaml").text == text.replace("args", "input")


def test_words_that_cannot_be_rewritten_are_named() -> None:
    steps = "- step: a\n  tool: {label: {kind: artifact, name: other, action: get}}\n"
    migration = migrate(with_steps(steps), "sample.yaml")
    assert migration.text == with_steps(steps)
    [problem] = migration.problems
    assert (problem.severity, problem.place.line) == ("warning", 6)
    assert "stays labelled" in problem.message
    same = "- step: a\n  tool: {kind: noop}\n  set: {ctx.a: 1}\n  vars: {a: 2}\n"
    [problem] = migrate(with_steps(same), "sample.yaml").problems
    assert "they set the same name" in problem.message


def test_mixed_ends_of_lines_stay() -> None:
    text = with_steps("- step: a\n  args: {b: 1}\n  tool: {kind: noop}\n").replace(
        "kind: Playbook\n", "kind: Playbook\r\n"
    )
    assert migrate(text, "sample.yaml").text == text.replace("  args: {b: 1}\n", "  input: {b: 1}\n")


def test_a_playbook_in_json_stays_one() -> None:
    text = '{"apiVersion": "noetl.io/v2", "kind": "Playbook",\n "metadata": {"name": "a", "path":"b"},\n "workflow": [{%s}]}'
    older = text % '"step": "a",  "args": {"x":1}, "tool": {"kind": "noop"}, "next": [{"step": "a"}]'
    newer = text % '"step": "a",  "input": {"x":1}, "tool": {"kind": "noop"}, "next": {"arcs": [{"step": "a"}]}'
    assert migrate(older, "sample.yaml").text == newer


def test_a_form_that_cannot_be_rewritten_is_left_as_it_is() -> None:
    text = with_steps("- step: a\n  ? args\n  : {b: 1}\n  tool: {kind: noop}\n")
    migration = migrate(text, "sample.yaml")
    assert migration.text == text
    assert migrate(text.replace("args", "input"), "sample.yaml").problems == ()
    assert "is left as it is: the key '? args' is written with '?'" in migration.problems[0].message
