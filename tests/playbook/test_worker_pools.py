"""``spec.pool``: a pool of workers with ``dispatch: workers``, one of Dagster's without."""

from __future__ import annotations

import pytest

from tests.playbook.playbooks import load, problems_of

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
