"""Whatever a file holds, loading ends with a playbook or with problems that have places."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.models import Playbook
from tests.playbook.playbooks import HEAD, with_steps
from tests.playbook.test_dialects import NEWER, OLDER

pytestmark = pytest.mark.long

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
    | {
        "metadata": METADATA,
        "keychain": {"api": {"kind": "bearer"}},
        "workbook": {"tasks": {"t": {"kind": "noop"}}},
    },
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

ODD = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        "",
        "text",
        "{{ a }}",
        "{{ a",
        [],
        [1],
        [None],
        {},
        {"a": 1},
        {"kind": "noop"},
        [[]],
    ]
)


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


@settings(max_examples=400, deadline=None)
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
