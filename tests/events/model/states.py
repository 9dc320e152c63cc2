"""The states of the model: what an execution has in the log and in the queue, and what processes read from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

DONE, FAILED = "done", "failed"
COMPLETED, CANCELLED, RUNNING = "completed", "cancelled", "running"

Place = tuple[int, ...]
"""What a fact is about: (visit, index, attempt) of a command, (visit, run) of a loop, (visit, epoch), or (epoch,)."""


class Sizes(NamedTuple):
    """Bounds of the states.

    Attributes:
        attempts: of an iteration in the first epoch; each later epoch adds one.
        claims: of a command, until the reaper ends it.
        releases: of claims that were not begun.
        withdrawals: of commands from the queue, by drivers that are interrupted.
        extras: workers send chunks too, and messages may become dead letters.
    """

    items: int = 1
    attempts: int = 1
    claims: int = 2
    epochs: int = 2
    visits: int = 1
    releases: int = 0
    withdrawals: int = 0
    extras: bool = False


class Fact(NamedTuple):
    """A row of the log that the rules are about; ``claim`` is the number of a claim of the command, 0 for none."""

    kind: str
    place: Place
    claim: int = 0
    outcome: str = ""


class Row(NamedTuple):
    """A row of the queue. ``claim``: that of its last holder; ``is_due``: its lease has lapsed."""

    place: Place
    claim: int
    is_leased: bool
    is_due: bool
    attempts: int
    limit: int


class State(NamedTuple):
    """The facts of the log, sorted, the rows of the queue, and what the bounds still allow."""

    log: tuple[Fact, ...]
    rows: tuple[Row, ...]
    releases: int
    withdrawals: int


class Action(NamedTuple):
    """A transaction of a process. As text: ``end 1 0 1 by 2 done``, for the end that the second claim sends."""

    name: str
    place: Place = ()
    claim: int = 0
    outcome: str = ""

    @classmethod
    def of(cls, text: str) -> Action:
        """Reads an action."""
        name, *words = text.split()
        outcome = words.pop() if words and words[-1].isalpha() else ""
        place, _, claim = " ".join(words).partition(" by ")
        return cls(name, tuple(map(int, place.split())), int(claim or 0), outcome)

    def __str__(self) -> str:
        claim = f"by {self.claim}" if self.claim else ""
        return " ".join(filter(None, (self.name, *map(str, self.place), claim, self.outcome)))


class Step(NamedTuple):
    """An action, the result that its process sees, and the state after it."""

    action: Action
    result: str
    after: State


@dataclass(frozen=True)
class View:
    """What processes read from a state."""

    state: State

    @cached_property
    def facts(self) -> set[tuple[str, Place]]:
        """Kinds and places of the facts."""
        return {(fact.kind, fact.place) for fact in self.state.log}

    @cached_property
    def ends(self) -> dict[Place, Fact]:
        """The ends of commands."""
        return {fact.place: fact for fact in self.state.log if fact.kind == "ended"}

    @cached_property
    def rows(self) -> dict[Place, Row]:
        """Rows of the queue by their commands."""
        return {row.place: row for row in self.state.rows}

    def of(self, kind: str) -> list[Fact]:
        """Returns the facts of a kind, in order."""
        return [fact for fact in self.state.log if fact.kind == kind]

    @cached_property
    def epoch(self) -> int:
        """The latest epoch."""
        return max((fact.place[0] for fact in self.of("resumed")), default=1)

    @cached_property
    def is_cancelled(self) -> bool:
        """Reports that the execution was cancelled."""
        return any(fact.outcome == CANCELLED for fact in self.of("over"))

    def status(self, fenced: bool = True) -> str:
        """Returns the status. ``fenced``: the ends of earlier epochs do not count."""
        ends = [fact for fact in self.of("over") if fact.place == (self.epoch,) or not fenced]
        return CANCELLED if self.is_cancelled else ends[-1].outcome if ends else RUNNING

    @cached_property
    def exits(self) -> dict[int, str]:
        """How each visit ended; the failures of earlier epochs do not count."""
        exited = [fact for fact in self.of("exited") if fact.outcome == DONE or fact.place[1] == self.epoch]
        return {fact.place[0]: fact.outcome for fact in exited}

    def is_done(self, visit: int, index: int) -> bool:
        """Reports that an attempt of an iteration succeeded."""
        return any(end.outcome == DONE and place[:2] == (visit, index) for place, end in self.ends.items())
