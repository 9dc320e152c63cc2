"""The decisions of a task's policy, as the end of its command records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noetl_dagster.events.envelopes import ERROR, Envelope
from noetl_dagster.playbook.models import Directive, PolicyAction
from noetl_dagster.playbook.rules import DEFAULT, ELSE, RuleName
from noetl_dagster.worker.program import CompiledRule

REASON_CHARACTERS = 200
"""Length of an error's message in a decision; the command's own error has more of it."""


class Decisions:
    """Counts the decisions of one task's policy: one entry for each rule and what it decided, in their first order.

    They begin with the first decision that a task without a policy would not have made.

    Args:
        rules: of the policy.
        earlier: calls before, which all succeeded and continued without a condition.
    """

    def __init__(self, rules: Sequence[CompiledRule], earlier: int) -> None:
        name = ELSE if rules[-1].when is None else DEFAULT
        self.entries: list[dict[str, Any]] = []
        if earlier:
            self.entries.append({"rule": name, "do": Directive.CONTINUE.value, "times": earlier})

    def add(self, rule: CompiledRule, envelope: Envelope, *, exhausted: bool) -> None:
        """Notes what a rule decided about an outcome. ``exhausted``: a retry for which no attempt is left."""
        entry = self._entry(rule.name, _decided(rule.action, exhausted=exhausted))
        entry["times"] += 1
        if envelope["status"] == ERROR:
            entry["error"] = _reason(envelope["error"])

    def _entry(self, name: RuleName, decided: dict[str, Any]) -> dict[str, Any]:
        for entry in self.entries:
            if entry["rule"] == name and entry["do"] == decided["do"]:
                return entry
        self.entries.append({"rule": name, **decided, "times": 0})
        return self.entries[-1]


def _decided(action: PolicyAction, *, exhausted: bool) -> dict[str, Any]:
    if exhausted:
        return {"do": "fail", "exhausted": True}
    decided = {"do": action.do.value}
    return decided | {"to": action.to} if action.do is Directive.JUMP else decided


def _reason(error: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of an error, which is redacted already, that explains a decision about it."""
    reason = {name: error[name] for name in ("kind", "status") if error.get(name) is not None}
    return reason | {"message": error["message"][:REASON_CHARACTERS]}
