"""The rules for commands, claims, leases, loops, visits and epochs as a model that needs no database.

A :class:`State` is what an execution has in the log, and its rows of the queue. An :class:`Action` is one transaction of
a process: a driver, a worker, the reaper, or a person who cancels. :class:`Model` computes the state after an action, and
the result that the process sees. Each :class:`Rule` can be left out, to show that the checks notice its absence.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from tests.events.model.states import (
    CANCELLED,
    COMPLETED,
    DONE,
    FAILED,
    RUNNING,
    Action,
    Fact,
    Place,
    Row,
    Sizes,
    State,
    Step,
    View,
)


class Rule(Enum):
    """A rule that an index, a lock or a condition of a statement enforces."""

    ISSUED_ONCE = auto()
    ENDED_ONCE = auto()
    FENCED = auto()
    GATED = auto()
    LOOP_ENDS_ONCE = auto()
    VISIT_ENTERED_ONCE = auto()
    VISIT_ENDS_ONCE = auto()
    EPOCH_ENDS_ONCE = auto()
    RESUMED_ONCE = auto()
    CHUNK_ONCE = auto()
    LETTER_ONCE = auto()
    ENDED_IS_NOT_QUEUED = auto()
    CANCELLATION_ENDS_CLAIMS = auto()
    EPOCHS_FENCE = auto()
    LEASES_LAPSE = auto()
    REAPED = auto()


ALL = frozenset(Rule)


class Model:
    """Computes the actions that are possible in a state, and what they do."""

    def __init__(self, sizes: Sizes, rules: frozenset[Rule] = ALL) -> None:
        self.sizes = sizes
        self.rules = rules

    def start(self) -> State:
        """Returns the state of a new execution."""
        return State((), (), self.sizes.releases, self.sizes.withdrawals)

    def steps(self, state: State) -> Iterator[Step]:
        """Yields each action that a process may try, also one that is stale or repeats what is done."""
        view = View(state)
        for action in self.actions(view):
            yield self.apply(view, action)

    def status(self, view: View) -> str:
        """Returns the status of an execution; the ends of earlier epochs do not count."""
        return view.status(Rule.EPOCHS_FENCE in self.rules)

    def apply(self, view: View, action: Action) -> Step:
        """Returns an action with its result, in any state."""
        result, after = getattr(self, f"_{action.name}")(view, action)
        return Step(action, result, after)

    def actions(self, view: View) -> Iterator[Action]:
        """Yields the actions that processes may try."""
        yield from self._of_drivers(view)
        for place in sorted(place for kind, place in view.facts if kind == "issued"):
            yield Action("issue", place)
            yield Action("enqueue", place)
            if (row := view.rows.get(place)) is not None:
                yield from self._of_row(view, row)
        for fact in view.of("claimed"):
            yield from self._of_worker(view, fact)
        if Rule.REAPED in self.rules and any(row.is_leased for row in view.state.rows):
            yield Action("reap")
        yield Action("cancel")

    def _of_drivers(self, view: View) -> Iterator[Action]:
        for epoch in range(1, view.epoch + 1):
            yield from self._of_driver(view, epoch)
        if view.epoch < self.sizes.epochs:
            yield Action("resume", (view.epoch,))
        if view.epoch > 1:
            yield Action("resume", (view.epoch - 1,))

    def _of_driver(self, view: View, epoch: int) -> Iterator[Action]:
        """Yields what the driver of an epoch does, which may not know yet that another one has followed."""
        for visit in range(1, self.sizes.visits + 1):
            if visit > 1 and view.exits.get(visit - 1) != DONE:
                break
            yield Action("enter", (visit, epoch))
            if ("entered", (visit, epoch)) not in view.facts:
                break
            runs = [fact.place for fact in view.of("started") if fact.place[0] == visit and fact.place[2] <= epoch]
            if not runs or (runs[-1][2] < epoch and ("loop", runs[-1][:2]) in view.facts):
                yield Action("start", (visit, epoch, epoch))
                continue
            for index in range(self.sizes.items):
                place = self._due(view, visit, index, epoch)
                if place is not None and ("issued", place) not in view.facts:
                    yield Action("issue", place)
            if all(self._is_settled(view, visit, index, epoch) for index in range(self.sizes.items)):
                yield Action("end_loop", runs[-1][:2])
                whole = all(self._is_done_by(view, visit, index, epoch) for index in range(self.sizes.items))
                if ("loop", runs[-1][:2]) in view.facts:
                    yield Action("exit", (visit, epoch), outcome=DONE if whole else FAILED)
        last = max((fact.place[0] for fact in view.of("exited")), default=0)
        ended = [fact.outcome for fact in view.of("exited") if fact.place == (last, epoch)]
        if ended and (ended[0] == FAILED or last == self.sizes.visits):
            yield Action("finish", (epoch,), outcome=COMPLETED if ended[0] == DONE else FAILED)

    def _of_row(self, view: View, row: Row) -> Iterator[Action]:
        if not row.is_leased:
            yield Action("claim", row.place)
            if view.state.withdrawals:
                yield Action("withdraw", row.place)
        elif not row.is_due and Rule.LEASES_LAPSE in self.rules:
            yield Action("lapse", row.place)

    def _of_worker(self, view: View, fact: Fact) -> Iterator[Action]:
        """Yields what a worker sends that has claimed a command, however long ago, and possibly again."""
        for outcome in (DONE, FAILED):
            yield Action("end", fact.place, fact.claim, outcome)
        yield Action("beat", fact.place, fact.claim)
        yield Action("repeat", fact.place, fact.claim)
        if view.state.releases:
            yield Action("release", fact.place, fact.claim)
        if self.sizes.extras:
            yield Action("chunk", fact.place, fact.claim)
            yield Action("bury", fact.place, fact.claim)
            if any(one.kind == "letter" and one[1:3] == fact[1:3] for one in view.state.log):
                yield Action("unearth", fact.place, fact.claim)

    def _due(self, view: View, visit: int, index: int, epoch: int) -> Place | None:
        """Returns the attempt of an iteration that is due, or runs; None if it is settled."""
        if self._is_settled(view, visit, index, epoch):
            return None
        attempt = 1
        while (end := view.ends.get((visit, index, attempt))) is not None and end.outcome == FAILED:
            attempt += 1
        return visit, index, attempt

    def _is_settled(self, view: View, visit: int, index: int, epoch: int) -> bool:
        last = view.ends.get((visit, index, self.sizes.attempts + epoch - 1))
        return self._is_done_by(view, visit, index, epoch) or last is not None

    def _is_done_by(self, view: View, visit: int, index: int, epoch: int) -> bool:
        """Reports that an iteration succeeded in an attempt that the driver of an epoch waits for."""
        attempts = range(1, self.sizes.attempts + epoch)
        ends = [view.ends.get((visit, index, attempt)) for attempt in attempts]
        return any(end is not None and end.outcome == DONE for end in ends)

    # what drivers do

    def _once(self, view: View, rule: Rule, fact: Fact) -> tuple[str, State]:
        if rule in self.rules and (fact.kind, fact.place) in view.facts:
            return "known", view.state
        return "new", _logged(view.state, fact)

    def _enter(self, view: View, action: Action) -> tuple[str, State]:
        return self._once(view, Rule.VISIT_ENTERED_ONCE, Fact("entered", action.place))

    def _start(self, view: View, action: Action) -> tuple[str, State]:
        return "new", _logged(view.state, Fact("started", action.place))

    def _issue(self, view: View, action: Action) -> tuple[str, State]:
        if view.is_cancelled and Rule.GATED in self.rules:
            return "refused", view.state
        return self._once(view, Rule.ISSUED_ONCE, Fact("issued", action.place))

    def _enqueue(self, view: View, action: Action) -> tuple[str, State]:
        ended = action.place in view.ends and Rule.ENDED_IS_NOT_QUEUED in self.rules
        if ended or action.place in view.rows or (view.is_cancelled and Rule.GATED in self.rules):
            return "nothing", view.state
        row = Row(action.place, 0, False, False, 0, self.sizes.claims)
        return "queued", view.state._replace(rows=tuple(sorted((*view.state.rows, row))))

    def _withdraw(self, view: View, action: Action) -> tuple[str, State]:
        row = view.rows.get(action.place)
        if row is None or row.is_leased:
            return "nothing", view.state
        return "withdrawn", _queued(view.state, row)._replace(withdrawals=view.state.withdrawals - 1)

    def _end_loop(self, view: View, action: Action) -> tuple[str, State]:
        return self._once(view, Rule.LOOP_ENDS_ONCE, Fact("loop", action.place))

    def _exit(self, view: View, action: Action) -> tuple[str, State]:
        if view.is_cancelled and Rule.GATED in self.rules:
            return "refused", view.state
        return self._once(view, Rule.VISIT_ENDS_ONCE, Fact("exited", action.place, outcome=action.outcome))

    def _finish(self, view: View, action: Action) -> tuple[str, State]:
        """Ends an epoch; its driver sees the status of the execution if another process was faster."""
        if action.place != (view.epoch,) and Rule.EPOCHS_FENCE in self.rules:
            return self.status(view), view.state
        result, after = self._once(view, Rule.EPOCH_ENDS_ONCE, Fact("over", action.place, outcome=action.outcome))
        return (action.outcome if result == "new" else self.status(view)), after

    def _resume(self, view: View, action: Action) -> tuple[str, State]:
        [epoch] = action.place
        if self.status(view) in (COMPLETED, CANCELLED) or (epoch != view.epoch and Rule.RESUMED_ONCE in self.rules):
            return "refused", view.state
        return "new", _logged(view.state, Fact("resumed", (epoch + 1,)))

    def _cancel(self, view: View, action: Action) -> tuple[str, State]:
        if self.status(view) != RUNNING:
            return "too late", view.state
        claimed = {fact.place for fact in view.of("claimed")} - view.ends.keys()
        ends = [Fact("ended", place, outcome=FAILED) for place in claimed]
        if Rule.CANCELLATION_ENDS_CLAIMS not in self.rules:
            ends = []
        after = _logged(view.state, Fact("over", (view.epoch,), outcome=CANCELLED), *ends)
        return "new", after._replace(rows=())

    # what workers and the reaper do

    def _claim(self, view: View, action: Action) -> tuple[str, State]:
        row = view.rows.get(action.place)
        if row is None or row.is_leased or (view.is_cancelled and Rule.GATED in self.rules):
            return "nothing", view.state
        number = sum(fact.place == action.place for fact in view.of("claimed")) + 1
        leased = row._replace(claim=number, is_leased=True, is_due=False, attempts=row.attempts + 1)
        return "claimed", _logged(_queued(view.state, row, leased), Fact("claimed", action.place, number))

    def _repeat(self, view: View, action: Action) -> tuple[str, State]:
        """Claims again under the same id, as after a lost answer: returns the same command, or none."""
        row = view.rows.get(action.place)
        return ("claimed" if row and row.is_leased and row.claim == action.claim else "nothing"), view.state

    def _end(self, view: View, action: Action) -> tuple[str, State]:
        end, known = Fact("ended", *action[1:]), view.ends.get(action.place)
        row = view.rows.get(action.place)
        if known == end:
            return "known", view.state
        holds = row is not None and row.claim == action.claim
        if not holds and (Rule.FENCED in self.rules or (known and Rule.ENDED_ONCE in self.rules)):
            return "refused", view.state
        return "new", _logged(view.state if row is None else _queued(view.state, row), end)

    def _beat(self, view: View, action: Action) -> tuple[str, State]:
        row = view.rows.get(action.place)
        if row is None or row.claim != action.claim:
            return "refused", view.state
        return "new", _queued(view.state, row, row._replace(is_due=False))

    def _release(self, view: View, action: Action) -> tuple[str, State]:
        row = view.rows.get(action.place)
        if row is None or not row.is_leased or row.claim != action.claim:
            return "nothing", view.state
        waits = row._replace(claim=0, is_leased=False, is_due=False, limit=row.limit + 1)
        return "released", _queued(view.state, row, waits)._replace(releases=view.state.releases - 1)

    def _lapse(self, view: View, action: Action) -> tuple[str, State]:
        row = view.rows[action.place]
        return "", _queued(view.state, row, row._replace(is_due=True))

    def _reap(self, view: View, action: Action) -> tuple[str, State]:
        """Queues commands again whose leases have lapsed, and ends those without further attempts."""
        state, counts = view.state, [0, 0]
        for row in view.state.rows:
            if row.is_due:
                exhausted = row.attempts >= row.limit
                counts[exhausted] += 1
                if exhausted:
                    state = _logged(_queued(state, row), Fact("ended", row.place, outcome=FAILED))
                else:
                    state = _queued(state, row, row._replace(is_leased=False, is_due=False))
        return f"{counts[0]} queued, {counts[1]} failed", state

    def _chunk(self, view: View, action: Action) -> tuple[str, State]:
        """Stores a chunk, one for each iteration; late chunks of the worker whose end counts are stored too."""
        chunk = Fact("chunk", action.place[:2], action.place[2], str(action.claim))
        row, end = view.rows.get(action.place), view.ends.get(action.place)
        if chunk in view.state.log:
            return "known", view.state
        holds = (row is not None and row.claim == action.claim) or (end is not None and end.claim == action.claim)
        if not holds:
            return "refused", view.state
        result, after = self._once(view, Rule.CHUNK_ONCE, chunk)
        return ("new" if result == "new" else "refused"), after

    def _bury(self, view: View, action: Action) -> tuple[str, State]:
        """Stores the message of a successful end as a dead letter, however often it is delivered."""
        letter = Fact("letter", action.place, action.claim)
        if letter in view.state.log and Rule.LETTER_ONCE in self.rules:
            return "", view.state
        return "", _logged(view.state, letter)

    def _unearth(self, view: View, action: Action) -> tuple[str, State]:
        """Sends a dead letter to the log once more; it is kept if the log refuses it."""
        letter = Fact("letter", action.place, action.claim)
        if letter not in view.state.log:
            return "gone", view.state
        result, after = self._end(view, action._replace(outcome=DONE))
        if result == "refused":
            return result, view.state
        return result, after._replace(log=tuple(fact for fact in after.log if fact != letter))


def _logged(state: State, *facts: Fact) -> State:
    return state._replace(log=tuple(sorted((*state.log, *facts))))


def _queued(state: State, before: Row, after: Row | None = None) -> State:
    rows = [row for row in state.rows if row != before]
    return state._replace(rows=tuple(sorted(rows if after is None else [*rows, after])))
