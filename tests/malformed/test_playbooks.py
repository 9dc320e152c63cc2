"""Files that are no playbooks: each is refused with the place of its first problem, and none makes the loader raise."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.loader import load_report, parse_report
from noetl_dagster.playbook.models import Playbook
from tests.playbook.playbooks import HEAD, with_steps
from tests.playbook.test_dialects import NEWER, OLDER

OK = b"workflow: [{step: start, tool: {kind: noop}}]\n"
BOMB = b", ".join(b"%c: &%c [%s]" % (new, new, b", ".join([b"*%c" % old] * 10)) for old, new in pairwise(b"abcdef"))
VALUE, SYNTAX, UNREADABLE = ProblemKind.INVALID_VALUE, ProblemKind.YAML_SYNTAX, ProblemKind.UNREADABLE_FILE
UNKNOWN, MISSING = ProblemKind.UNKNOWN_FIELD, ProblemKind.MISSING_FIELD

FILES: dict[str, tuple[bytes, str, ProblemKind]] = {
    "empty": (b"", "1:1", VALUE),
    "a text": (b"text", "1:1", VALUE),
    "a list": (b"- a\n", "1:1", VALUE),
    "JSON": (b'{"apiVersion": 1}', "1:1", MISSING),
    "a script": (b"#!/bin/sh\nrm x\n", "2:1", VALUE),
    "every byte": (bytes(range(256)), "2:118", UNREADABLE),
    "UTF-16": ("a: b".encode("utf-16"), "1:1", UNREADABLE),
    "Latin-1": (b"a: b\nc: \xe9t\xe9\n", "2:4", UNREADABLE),
    "a byte order mark in the middle": (OK + b"\xef\xbb\xbfkind: x\n", "2:2", SYNTAX),
    "a tab": (b"workflow:\n\t- step: a\n", "2:1", SYNTAX),
    "an open list": (b"workflow: [\n", "2:1", SYNTAX),
    "an open text": (b'workload: "x\n', "2:1", SYNTAX),
    "two documents": (OK + b"---\na: 1\n", "2:1", SYNTAX),
    "text after its end": (OK + b"...\n...\nx\n", "4:1", SYNTAX),
    "another version of YAML": (b"%YAML 9.9\n---\n" + OK, "1:1", SYNTAX),
}
WORKLOADS: dict[str, tuple[bytes, str, ProblemKind]] = {
    "NUL": (b'{a: "\xc3\xa9\0"}', "4:17", SYNTAX),
    "half a surrogate": (b'{a: "\\ud800"}', "4:18", SYNTAX),
    "an unknown escape": (b'{a: "\\q"}', "4:16", SYNTAX),
    "invalid UTF-8": (b"{a: \xff}", "4:15", UNREADABLE),
    "an unknown alias": (b"{a: *x}", "4:15", SYNTAX),
    "aliases of aliases": (b"{a: &a [x, x], " + BOMB + b", g: [" + b"*f, " * 9 + b"]}", "4:221", VALUE),
    "an alias inside itself": (b"&a {b: *a}", "4:11", VALUE),
    "a merge of a text": (b"{<<: x}", "4:16", VALUE),
    "a tag of Python for a list": (b"{a: !!python/object/apply:os.system [x]}", "4:15", VALUE),
    "a tag of another program": (b"{a: !secret x}", "4:15", VALUE),
    "an invalid number": (b"{a: !!int x}", "4:15", VALUE),
    "an invalid binary": (b"{a: !!binary \xc3\xa9}", "4:15", VALUE),
    "a list as a key": (b"{[a]: 1}", "4:11", VALUE),
    "a template without quotes": (b"{a: {{ b }}}", "4:15", VALUE),
    "a number of 5,000 digits": (b"{a: " + b"9" * 5_000 + b"}", "4:15", VALUE),
    "deep lists": (b"[" * 1_000 + b"]" * 1_000, "4:109", VALUE),
    "deep mappings": (b"{a: " * 1_000 + b"1" + b"}" * 1_000, "4:403", VALUE),
    "a long text": (b"{a: " + b"x" * 5_000_000 + b"}", "1:1", VALUE),
    "a repeated key": (b"{a: 1, b: 2, a: 3}", "4:24", ProblemKind.DUPLICATE_KEY),
    "a list": (b"[1]", "4:11", VALUE),
}


@pytest.mark.parametrize(
    ("content", "place", "kind"),
    [
        *FILES.values(),
        *((HEAD.encode() + b"workload: " + one + b"\n" + OK, *more) for one, *more in WORKLOADS.values()),
    ],
    ids=[*FILES, *WORKLOADS],
)
def test_the_first_problem_has_its_place(content: bytes, place: str, kind: ProblemKind, tmp_path: Path) -> None:
    file = tmp_path / "sample.yaml"
    file.write_bytes(content)
    playbook, problems = load_report(file, code=True)
    assert playbook is None
    first = next(problem for problem in problems if problem.severity == "error")
    assert (str(first.place), first.kind) == (f"{file}:{place}", kind)
    assert len(first.message) < 400


@pytest.mark.parametrize("before", ["", "a: \u00e9\n"])
def test_texts_that_are_no_unicode(before: str) -> None:
    playbook, [problem] = parse_report(f"{before}b: \ud800\n", file="x.yaml")
    assert playbook is None
    assert str(problem.place) == f"x.yaml:{2 if before else 1}:4"
    assert "U+D800" in problem.message


EVERYTHING = """
executor: {spec: {timeout: 5, loop_mode: parallel}}
keychain: [{name: api, kind: bearer}]
workbook: [{name: greet, tool: {kind: noop}}]
workload: {users: [1], api: x}
"""
METADATA = {
    "name": "a",
    "path": "b",
    "version": 1,
    "tags": ["x"],
    "owners": "y",
    "schedule": "0 * * * *",
    "partitions": {"kind": "daily", "start": "2026-01-01"},
}
DAGSTER = """
dagster:
  group: clinical/{{ metadata.name }}
  owners: ["team:data", ana@example.org]
  tags: {domain: health}
  pools: {api: 16}
  schedules: [{name: nightly, cron: "0 2 * * *", timezone: Europe/Berlin, workload: {full: true}, status: running}]
  partitions: {two: {day: {kind: daily, start: "2026-01-01", end: "2027-01-01", workload: api}, f: {static: [a, b]}}}
  automation: {on_cron: "0 3 * * *"}
  freshness: {warn_after: 26h, fail_after: 50h}
  observe: [{asset: lake/raw, object: "s3://lake/*.parquet", every: 10m}, {asset: t, table: public.t, auth: pg}]
"""
TREES = [
    yaml.safe_load(
        with_steps(
            """
            - step: start
              tool: {kind: noop}
              asset: {key: [a, b], description: c, group: g, owners: ["team:x"], kinds: [parquet], tags: {a: b},
                      metadata: {n: 1}, code_version: "3"}
              checks:
                - {name: enough, when: "{{ output }}", severity: warn, description: x}
                - {unique: id, blocking: true}
                - {not_null: [a, b]}
                - {accepted: {sex: [F, M]}}
                - {between: {age: [0, null]}}
                - {row_count: {min: 1, max: 5}}
                - {fresh: {at: 26h}}
              from: {raw: {asset: warehouse/raw, partition: latest}, other: [x, y]}
            - {step: last, asset: false, tool: {kind: noop}}
            """,
            root=EVERYTHING + DAGSTER,
        )
    ),
    yaml.safe_load(HEAD + "workflow: [{step: a, next: []}]")
    | {"metadata": METADATA, "keychain": {"api": {"kind": "bearer"}}, "workbook": {"tasks": {"t": {"kind": "noop"}}}},
    yaml.safe_load(with_steps(NEWER, root=EVERYTHING)),
    yaml.safe_load(with_steps(OLDER, root=EVERYTHING)),
    yaml.safe_load(
        with_steps(
            """
            - step: start
              spec:
                loop_mode: fanout
                fanout: {max_groups: 2}
                policy: {admit: {rules: [{else: {allow: true}}]}}
              loop: {in: [1], iterator: x, spec: {frame: {max_rows: 5}}}
              tool: {kind: http, url: x, headers: {a: b}, timeout: 5, output_select: [a]}
              retry:
                - when: true
                  then: {max_attempts: 2, next_call: {params: {a: 1}}, collect: {path: data}}
              sink: {tool: {kind: postgres, table: t}, args: {a: 1}}
              next: end
            - step: end
              loop: {cursor: {kind: postgres, auth: pg, claim: SELECT 1}, iterator: row}
              tool: {kind: workbook, name: greet}
            """,
            root=EVERYTHING,
        )
    ),
]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, "", "text", "{{ a }}", "{{ a", [], [1], [None], {}, {"a": 1}, {"kind": "noop"}),
    [[]],
)
ODD = st.sampled_from(ODD_VALUES)


def paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here] * bool(here) + [path for key, value in inner for path in paths(value, (*here, key))]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A playbook with a value replaced, a key removed, or a key renamed."""
    tree = copy.deepcopy(draw(st.sampled_from(TREES)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(tree)))
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        change = draw(st.sampled_from(["replace", "remove", "rename"]))
        if change == "replace" or not isinstance(owner, dict):
            owner[path[-1]] = copy.deepcopy(draw(ODD))
        elif change == "remove":
            del owner[path[-1]]
        else:
            owner[f"{path[-1]}x"] = owner.pop(path[-1])
    return tree


def test_each_field_of_a_wrong_type() -> None:
    """The tests below damage several at once."""
    for tree in TREES:
        for number, path in enumerate(paths(tree)):
            changed = copy.deepcopy(tree)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = copy.deepcopy(ODD_VALUES[number % len(ODD_VALUES)])
            playbook, problems = parse_report(yaml.dump(changed, Dumper=yaml.CSafeDumper), file="x.yaml")
            assert (playbook is None) == any(problem.severity == "error" for problem in problems)
            assert all(problem.place.file == "x.yaml" and problem.place.line >= 1 for problem in problems)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(damaged())
def test_damaged_playbooks_never_break_the_loader(tree: Any) -> None:
    text = yaml.safe_dump(tree)
    for lenient in (False, True):
        playbook, problems = parse_report(text, file="x.yaml", lenient=lenient)
        assert (playbook is None) == any(problem.severity == "error" for problem in problems)
        assert all(problem.place.file == "x.yaml" and problem.place.line >= 1 for problem in problems)
        if playbook is not None:
            assert playbook.stored is not None
            given: Any = {"file": "x.yaml", "renamed": {}, "lenient": lenient}
            assert Playbook.from_stored(playbook.stored, playbook.source, **given) == playbook


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abc:-[]{}'\"|>&*!%#@\n\t {{}}", max_size=80))
def test_any_text_is_reported_not_raised(text: str) -> None:
    for source in (text, HEAD + text):
        playbook, problems = parse_report(source)
        assert playbook is None
        assert problems


def test_the_trees_are_sound() -> None:
    for tree in TREES:
        assert parse_report(yaml.safe_dump(tree))[0] is not None


def test_aliases_inside_themselves_are_refused() -> None:
    for workload in ("&a {b: *a}", "{x: &a [*a, *a, [*a, *a]]}"):
        playbook, problems = parse_report(HEAD + f"workload: {workload}\nworkflow: []\n")
        assert playbook is None
        assert any("alias inside" in problem.message for problem in problems)


def test_a_byte_order_mark_and_windows_line_ends(tmp_path) -> None:
    from noetl_dagster.playbook.loader import load_playbook

    path = tmp_path / "dos.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + with_steps(NEWER).replace("\n", "\r\n").encode())
    assert len(load_playbook(path).steps) == 2
