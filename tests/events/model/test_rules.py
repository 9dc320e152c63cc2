"""The model: every state of small sizes keeps the rules, from every state the execution can end, and no rule is idle."""

from __future__ import annotations

import pytest

from tests.events.model.explorer import BrokenRuleError, explore, is_over
from tests.events.model.rules import ALL, Model, Rule
from tests.events.model.states import COMPLETED, Sizes, View

SMALL = {
    "claims and releases": Sizes(claims=2, epochs=1, releases=1),
    "two epochs": Sizes(claims=1, epochs=2),
    "two items": Sizes(items=2, claims=2, epochs=1),
    "chunks and dead letters": Sizes(claims=2, epochs=1, extras=True),
}
LARGE = {
    "retries over two epochs": Sizes(attempts=2, claims=2, epochs=2),
    "visits over two epochs": Sizes(visits=2, claims=1, epochs=2),
    "withdrawals and releases": Sizes(claims=2, epochs=2, withdrawals=1, releases=1),
    "two items over two epochs": Sizes(items=2, claims=1, epochs=2),
    "three epochs": Sizes(claims=2, epochs=3),
}

BROKEN = [
    (Rule.ISSUED_ONCE, SMALL["claims and releases"], "issued .* is in the log 2 times"),
    (Rule.FENCED, SMALL["claims and releases"], "which no longer held it"),
    (Rule.GATED, SMALL["claims and releases"], "after the cancellation"),
    (Rule.ENDED_IS_NOT_QUEUED, SMALL["claims and releases"], "is queued after its end"),
    (Rule.CANCELLATION_ENDS_CLAIMS, SMALL["claims and releases"], "has not ended with the cancelled execution"),
    (Rule.LOOP_ENDS_ONCE, SMALL["claims and releases"], "loop .* is in the log 2 times"),
    (Rule.VISIT_ENTERED_ONCE, SMALL["claims and releases"], "entered .* is in the log 2 times"),
    (Rule.VISIT_ENDS_ONCE, SMALL["claims and releases"], "exited .* is in the log 2 times"),
    (Rule.EPOCH_ENDS_ONCE, SMALL["claims and releases"], "over .* is in the log 2 times"),
    (Rule.RESUMED_ONCE, SMALL["two epochs"], "resumed .* is in the log 2 times"),
    (Rule.EPOCHS_FENCE, SMALL["two epochs"], "the end of an earlier epoch has ended a later one"),
    (Rule.CHUNK_ONCE, SMALL["chunks and dead letters"], "chunk .* is in the log 2 times"),
    (Rule.LETTER_ONCE, SMALL["chunks and dead letters"], "letter .* is in the log 2 times"),
]


def sizes(table: dict[str, Sizes], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(one, id=name, marks=marks) for name, one in table.items()]


@pytest.mark.parametrize("size", [*sizes(SMALL), *sizes(LARGE, pytest.mark.slow)])
def test_every_state_keeps_the_rules_and_can_end(size: Sizes) -> None:
    """An execution that has not been cancelled, and may be resumed again, can even complete."""
    model = Model(size)
    found = explore(model)
    assert found.dead_ends(is_over(model)) == []
    unable = map(View, found.dead_ends(lambda state: View(state).status() == COMPLETED))
    assert [view.state for view in unable if not view.is_cancelled and view.epoch < size.epochs] == []


@pytest.mark.parametrize(("rule", "size", "broken"), [pytest.param(*one, id=one[0].name.lower()) for one in BROKEN])
def test_without_a_rule_a_state_is_broken(rule: Rule, size: Sizes, broken: str) -> None:
    with pytest.raises(BrokenRuleError, match=broken):
        explore(Model(size, ALL - {rule}))


def test_an_end_that_nothing_fences_is_refused_by_the_index_alone() -> None:
    with pytest.raises(BrokenRuleError, match=r"ended .* is in the log 2 times"):
        explore(Model(SMALL["claims and releases"], ALL - {Rule.FENCED, Rule.ENDED_ONCE}))


@pytest.mark.parametrize("rule", [Rule.LEASES_LAPSE, Rule.REAPED])
def test_an_execution_ends_although_no_worker_answers(rule: Rule) -> None:
    """Only leases and the reaper end the commands of workers that are gone."""
    for rules, ends in ((ALL, True), (ALL - {rule}, False)):
        model = Model(SMALL["claims and releases"], rules)
        stuck = explore(model).dead_ends(is_over(model), without=("cancel", "end", "release"))
        assert (stuck == []) == ends
