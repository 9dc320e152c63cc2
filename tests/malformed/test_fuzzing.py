"""A sample of damaged inputs; ``make fuzz`` looks for more. Each input has 5 seconds."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.playbook.templates.rendering import compile_value
from tests.malformed.targets import LONGEST, TARGETS, WORDS, Target, damaged
from tests.playbook.playbooks import HEAD

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
fuzzing = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=5) if EXAMPLES >= 1000 else None,
    derandomize=EXAMPLES < 1000,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_damaged_inputs_end_with_what_is_documented(target: Target) -> None:
    seeds = [seed[:LONGEST] for seed in target.seeds()]

    @fuzzing
    @given(st.randoms(use_true_random=False))
    def ends(dice: random.Random) -> None:
        with suppress(*target.documented):
            target.run(damaged(dice, seeds, WORDS[target.words]))

    ends()


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
