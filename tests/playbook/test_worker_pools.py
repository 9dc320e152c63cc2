"""``spec.pool``: a pool of workers with ``dispatch: workers``, one of Dagster's without."""

from __future__ import annotations

import pytest

from noetl_dagster.playbook.loader import parse_report
from tests.playbook.playbooks import load, problems_of, with_steps

WORKERS = "- {step: start, tool: {kind: noop}, spec: {dispatch: workers, pool: %s}}"


def test_with_workers_any_name_is_a_pool() -> None:
    [step] = load(WORKERS % "gpu").steps
    assert (step.worker_pool, step.dagster_pool) == ("gpu", None)
    [step] = load("- {step: start, tool: {kind: noop}, spec: {dispatch: workers}}").steps
    assert (step.worker_pool, step.dagster_pool) == ("default", None)


def test_without_workers_it_is_dagsters() -> None:
    steps = "- {step: start, tool: {kind: noop}, spec: {pool: api}}"
    [step] = load(steps, root="dagster: {pools: {api: 2}}\n").steps
    assert (step.worker_pool, step.dagster_pool) == ("default", "api")


@pytest.mark.parametrize("name", ["Gpu", "a.b", "-a", "a_b", "a" * 64])
def test_names_that_are_none(name: str) -> None:
    [problem] = problems_of(WORKERS % name)
    assert "no pool of workers can be called" in problem.message


def test_a_name_of_both_kinds_is_pointed_out() -> None:
    [problem] = problems_of(WORKERS % "api", root="dagster: {pools: {api: 2}}\n")
    assert problem.severity == "warning"
    assert "the slots of dagster.pools do not bound it" in problem.message


def test_the_executors_pool_is_for_steps_that_go_to_workers() -> None:
    steps = (
        "- {step: start, tool: {kind: noop}, next: [here]}\n"
        "- {step: here, tool: {kind: noop}, spec: {dispatch: inline}, next: [own]}\n"
        "- {step: own, tool: {kind: noop}, spec: {pool: own}}"
    )
    found = load(steps, root="executor: {spec: {dispatch: workers, pool: gpu}}\n").steps
    assert [(step.worker_pool, step.dagster_pool) for step in found] == [
        ("gpu", None),
        ("default", None),
        ("own", None),
    ]
    known = "executor: {spec: {pool: api}}\ndagster: {pools: {api: 2}}\n"
    [first, second] = load(
        "- {step: start, tool: {kind: noop}, spec: {dispatch: workers}, next: [here]}\n"
        "- {step: here, tool: {kind: noop}}",
        root=known,
    ).steps
    assert (first.worker_pool, first.dagster_pool) == ("default", None)
    assert second.dagster_pool == "api"


def test_an_execution_under_way_goes_on_with_names_and_pods_that_are_refused_now() -> None:
    spec = "{dispatch: workers, pool: My_Slots, kubernetes: {cpu: plenty, memory: 1, tolerations: 7}}"
    steps = with_steps(f"- step: start\n  tool: {{kind: noop}}\n  spec: {spec}")
    assert parse_report(steps)[0] is None
    playbook, problems = parse_report(steps, lenient=True)
    assert playbook is not None
    assert {problem.severity for problem in problems} == {"warning"}
    assert (playbook.steps[0].worker_pool, playbook.steps[0].spec.pod) == ("default", None)
    cycle = with_steps(
        "- {step: start, tool: {kind: noop}, spec: {kubernetes: {cpu: 1}}, next: [back]}\n"
        "- {step: back, tool: {kind: noop}, spec: {kubernetes: {cpu: 2}}, next: [start]}"
    )
    assert parse_report(cycle)[0] is None
    assert parse_report(cycle, lenient=True)[0] is not None
