"""The names of policy rules, by which events refer to them, and their places in the playbook."""

from __future__ import annotations

from typing import NamedTuple

from noetl_dagster.playbook.models import Playbook, PolicyRule, Task

RuleName = int | str
"""The number of a rule from 0, ``else``, or ``default`` if no rule matched."""

ELSE: RuleName = "else"
DEFAULT: RuleName = "default"


class RulePlace(NamedTuple):
    """Where a rule is in the text of its playbook, and its condition: text or a boolean, None for ``else``."""

    line: int | None
    when: str | bool | None


def rule_name(number: int, rule: PolicyRule) -> RuleName:
    """Returns the name of the rule at a position of its policy."""
    return ELSE if rule.when is None else number


def rule_places(playbook: Playbook) -> dict[tuple[str, str, RuleName], RulePlace]:
    """Returns the places of all policy rules by step, task and rule, as ``meta.tasks`` of events names them.

    The line is None if another version stored the playbook without it.
    """
    return {
        (step.name, task.name, rule_name(number, rule)): RulePlace(rule.place.line if rule.place else None, rule.when)
        for step in playbook.steps
        for task in step.tasks
        for number, rule in enumerate(_policy_of(playbook, task))
    }


def workbook_name(task: Task) -> str:
    """Returns the name of the workbook task that a task of kind ``workbook`` runs."""
    return str(task.config.get("name") or task.config.get("task") or task.name)


def _policy_of(playbook: Playbook, task: Task) -> tuple[PolicyRule, ...]:
    if task.kind != "workbook" or task.spec.policy:
        return task.spec.policy
    named = playbook.workbook.get(workbook_name(task))
    return () if named is None else named.spec.policy
