"""Explores every state of the model, checks each step, and finds states from which no execution can end."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from tests.events.model.rules import Model
from tests.events.model.states import CANCELLED, COMPLETED, Action, Fact, State, Step, View


class BrokenRuleError(AssertionError):
    """A step breaks a rule; the message has the actions that lead there."""


@dataclass
class Explored:
    """The graph of states.

    Attributes:
        origin: the state and the action by which each state was first reached.
        before: the states from which each state is reached, with the names of the actions.
    """

    states: list[State] = field(default_factory=list)
    transitions: int = 0
    origin: dict[State, tuple[State, Action] | None] = field(default_factory=dict)
    before: defaultdict[State, set[tuple[State, str]]] = field(default_factory=lambda: defaultdict(set))

    def path(self, state: State) -> list[Action]:
        """Returns the shortest sequence of actions from the start to a state."""
        actions: list[Action] = []
        while (origin := self.origin[state]) is not None:
            state, action = origin
            actions.insert(0, action)
        return actions

    def dead_ends(self, is_goal: Callable[[State], bool], without: Collection[str] = ("cancel",)) -> list[State]:
        """Returns the states from which no goal can be reached ``without`` some actions."""
        alive = {state for state in self.states if is_goal(state)}
        waiting = deque(alive)
        while waiting:
            for state, action in self.before[waiting.popleft()]:
                if state not in alive and action not in without:
                    alive.add(state)
                    waiting.append(state)
        return [state for state in self.states if state not in alive]


def explore(model: Model, *, most: int = 10**7) -> Explored:
    """Visits all states breadth first.

    Raises:
        BrokenRuleError: a step breaks a rule.
    """
    start = model.start()
    found = Explored([start], origin={start: None})
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        view = View(state)
        for step in model.steps(state):
            found.transitions += 1
            if broken := list(broken_rules(model, view, step)):
                trace = ", ".join(map(str, [*found.path(state), step.action]))
                raise BrokenRuleError(f"{'; '.join(broken)}:\n{trace}")
            if step.after != state:
                found.before[step.after].add((state, step.action.name))
            if step.after not in found.origin:
                assert len(found.states) < most, f"more than {most} states"
                found.origin[step.after] = state, step.action
                found.states.append(step.after)
                waiting.append(step.after)
    return found


def is_over(model: Model) -> Callable[[State], bool]:
    """Returns the goal: an execution completed, was cancelled, or failed in the last epoch that the bounds allow."""

    def reached(state: State) -> bool:
        view = View(state)
        status = model.status(view)
        return status in (COMPLETED, CANCELLED) or (status == "failed" and view.epoch == model.sizes.epochs)

    return reached


def broken_rules(model: Model, before: View, step: Step) -> Iterator[str]:
    """Yields what is wrong with a step."""
    if step.after == before.state:
        return
    after, old, new = View(step.after), set(before.state.log), Counter(step.after.log)
    added = [fact for fact in new if fact not in old]
    yield from _twice(new)
    if old - new.keys() - {fact for fact in old if fact.kind == "letter"}:
        yield "a fact has left the log"
    yield from _of_rows(after)
    for fact in added:
        yield from _of_fact(model, before, step.action, fact)
    if before.is_cancelled:
        more = {fact for fact in added if fact.kind in ("issued", "claimed", "ended", "exited")}
        if more or after.state.rows:
            yield "commands were issued, queued, claimed or ended, or visits ended, after the cancellation"
    if after.is_cancelled and {fact.place for fact in after.of("claimed")} - after.ends.keys():
        yield "a claimed command has not ended with the cancelled execution"
    is_late = step.action.name == "finish" and step.action.place[0] < before.epoch
    if is_late and model.status(before) != model.status(after):
        yield "the end of an earlier epoch has ended a later one"


_UNIQUE_WITH_CLAIM = frozenset({"claimed", "letter"})


def _twice(log: Counter[Fact]) -> Iterator[str]:
    counts: Counter[tuple[object, ...]] = Counter()
    for fact, count in log.items():
        counts[fact.kind, fact.place, fact.claim if fact.kind in _UNIQUE_WITH_CLAIM else 0] += count
    for (kind, place, *_), count in counts.items():
        if count > 1:
            yield f"{kind} {place} is in the log {count} times"


def _of_rows(after: View) -> Iterator[str]:
    if len(after.rows) < len(after.state.rows):
        yield "a command is queued twice"
    for row in after.state.rows:
        if ("issued", row.place) not in after.facts:
            yield f"{row.place} is queued without having been issued"
        if row.place in after.ends:
            yield f"{row.place} is queued after its end"
        if row.is_leased and Fact("claimed", row.place, row.claim) not in after.state.log:
            yield f"{row.place} is leased without a claim"


def _of_fact(model: Model, before: View, action: Action, fact: Fact) -> Iterator[str]:
    row = before.rows.get(fact.place)
    if fact.kind == "ended" and fact.claim and (row is None or row.claim != fact.claim):
        yield f"{fact.place} was ended by claim {fact.claim}, which no longer held it"
    if fact.kind == "claimed" and (row is None or row.is_leased):
        yield f"{fact.place} was claimed while it did not wait"
    if fact.kind == "loop" and any(
        not any(place[:2] == (fact.place[0], index) for place in before.ends) for index in range(model.sizes.items)
    ):
        yield f"loop {fact.place} ended before its iterations"
    if fact.outcome == COMPLETED:
        last = max(place[0] for kind, place in before.facts if kind == "entered")
        if not all(before.is_done(last, index) for index in range(model.sizes.items)):
            yield "the execution completed although an iteration is not done"
