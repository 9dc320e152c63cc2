"""``state`` of a step as it is written, and what is refused of it."""

from __future__ import annotations

import pytest

from noetl_dagster.playbook.models import StateSpec
from tests.playbook.playbooks import errors_of, step_of, warnings_of

LOAD = "- step: load\n  tool: {kind: noop}\n  state: "


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("{key: updated_at, initial: 1970-01-01}", StateSpec(key="updated_at", initial="1970-01-01")),
        ("{key: a.b-c, initial: 0, name: n}", StateSpec(key="a.b-c", initial=0, name="n")),
        *(
            (f"{{key: n, initial: 0, concurrent: {word}}}", StateSpec(key="n", initial=0, concurrent=mode))
            for word, mode in (("Wait", "wait"), ("fail", "fail"), ("allow", "allow"), ("null", "wait"))
        ),
        ('{key: "{{ output.next }}", initial: null}', StateSpec(key="{{ output.next }}")),
    ],
)
def test_what_is_written(text: str, spec: StateSpec) -> None:
    assert step_of(LOAD + text).state == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("updated_at", "state must be a mapping such as state: {key: updated_at"),
        ("{initial: 0}", "step 'load', state needs 'key'; write state: {key: updated_at"),
        ("{key: n}", "step 'load', state needs 'initial'"),
        ("{key: n, initial: [1]}", "initial is one number or text, or a template, found a list"),
        ("{key: max(n), initial: 0}", "key is the text 'max(n)'; name a column of the result's rows"),
        ("{key: n, initial: 0, concurrent: skip}", "concurrent is 'skip'; use one of wait, fail, allow"),
        ("{key: n, initial: 0, inital: 1}", "unknown key 'inital'; did you mean 'initial'?"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    (error,) = errors_of(LOAD + text)
    assert problem in error
    assert error.startswith("sample.yaml:")


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("  next: [other]\n- step: other", "step 'load': 'state' needs a 'tool'"),
        (
            "  tool: {kind: noop}\n  loop: {in: [1], iterator: n}\n"
            "  spec: {loop_mode: fanout, fanout: {granularity: partition}}",
            "'state' asks each item's result how far it came, and partitions have none; use fanout.granularity: item",
        ),
    ],
)
def test_where_it_cannot_stand(rest: str, problem: str) -> None:
    (error,) = errors_of("- step: load\n  state: {key: n, initial: 0}\n" + rest)
    assert problem in error


def test_the_name_is_known_where_there_is_one() -> None:
    uses = '- step: load\n  tool: {kind: noop}\n  input: {since: "{{ state.value }}"}\n'
    assert "nothing in the playbook defines 'state'" in warnings_of(uses)[0]
    assert warnings_of(uses + "  state: {key: n, initial: 0}") == []
