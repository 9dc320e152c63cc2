"""A sample of the inputs that ``python -m tests.malformed.fuzzing`` checks for long, and what it has found."""

from __future__ import annotations

import pytest

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.templates.rendering import compile_value
from tests.forked import result_of
from tests.malformed.generated import check, corpus
from tests.malformed.guided import TARGETS, Fuzzer
from tests.playbook.playbooks import HEAD


def test_a_sample_ends_with_playbooks_or_problems() -> None:
    texts = corpus()
    for seed in range(40):
        check(seed, texts)


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_ends_with_what_is_documented(name: str) -> None:
    result_of(fuzz, name, 60)


def fuzz(name: str, steps: int) -> None:
    """Runs inputs of a target, whose coverage guides it."""
    fuzzer = Fuzzer(TARGETS[name])
    for _ in range(steps):
        fuzzer.step()


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999", "9" * 390, "'" + "9" * 390 + "'"])
@pytest.mark.parametrize("name", ["priority", "timeout"])
def test_numbers_that_are_none_are_problems(name: str, value: str) -> None:
    step = f"workflow:\n- step: start\n  tool: {{kind: noop}}\n  spec: {{{name}: {value}}}\n"
    playbook, problems = parse_report(HEAD + step)
    assert playbook is None
    assert problems[0].place.line == HEAD.count("\n") + 4


@pytest.mark.parametrize(
    "template", ["{{ [1] | map('items') }}", "{{ 1 | map('upper') }}", "{{ [1] | map('length') }}"]
)
def test_filters_that_work_late_are_template_errors(template: str) -> None:
    with pytest.raises(TemplateError):
        compile_value(template).render({})


@pytest.mark.parametrize(
    "template", ["{{ a", "{% if %}", "{{ " + "(" * 90 + "1" + ")" * 90 + " }}", "{{ a | nothing }}"]
)
def test_conditions_of_retries_that_do_not_parse_are_problems(template: str) -> None:
    retry = f"retry: {{max_attempts: 2, retry_on: [timeout], retry_when: '{template}', stop_when: '{template}'}}"
    playbook, problems = parse_report(HEAD + f"workflow:\n- step: start\n  tool: {{kind: noop}}\n  {retry}\n")
    assert playbook is None
    assert problems
