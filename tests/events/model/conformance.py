"""Compares the real log with the model, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noetl_dagster.settings import Settings
from tests.events.model.one_pool import OnePool, undone
from tests.events.model.real import RealLog
from tests.events.model.rules import Model
from tests.events.model.states import Action, State, Step, View

Choose = Callable[[Sequence[int]], int]

LIFECYCLE = frozenset({"exit", "finish", "resume", "cancel"})
"""Actions that change the status of an execution, or of a visit."""


async def conform(settings: Settings, pool: OnePool, model: Model, *, fanout: bool) -> int:
    """Performs every step of the model on the real log; returns how many there were.

    Each state is reached once, and undone before the next one: all happens in one transaction, which the caller opens
    and rolls back.
    """
    real = RealLog(settings, pool, model.sizes, fanout=fanout)
    await real.create()
    seen, steps, path = {model.start()}, 0, []

    async def visit(state: State) -> None:
        nonlocal steps
        for step in model.steps(state):
            steps += 1
            path.append(step.action)
            claims = dict(real.claims)
            async with undone(pool):
                await check(real, model, step, path)
                if step.after not in seen:
                    seen.add(step.after)
                    await visit(step.after)
            real.claims = claims
            path.pop()

    await visit(model.start())
    return steps


async def check(real: RealLog, model: Model, step: Step, path: list[Action]) -> None:
    """Performs an action, and compares its result and what the log and the queue hold with the model."""
    trace = ", ".join(map(str, path))
    result = await real.perform(step.action)
    assert result == step.result, f"the log says {result!r}, the model {step.result!r}:\n{trace}"
    assert await real.state(step.after) == step.after, f"the log and the model differ after:\n{trace}"
    if step.action.name in LIFECYCLE:
        view = View(step.after)
        found, expected = await real.status(), (model.status(view), view.exits)
        assert found == expected, f"the status is {found} in the log, {expected} in the model, after:\n{trace}"


async def check_batch(real: RealLog, model: Model, state: State, actions: list[Action], path: list[Action]) -> State:
    """Performs actions of a kind in one statement, which must do what one after the other does; returns the state."""
    expected = []
    for action in actions:
        step = model.apply(View(state), action)
        expected.append(step.result)
        state = step.after
    trace = ", ".join(map(str, path))
    results = await (real.issue_all if actions[0].name == "issue" else real.send)(actions)
    if len(set(actions)) == len(actions):  # a message that is twice in a batch has one result
        assert results == expected, f"the log says {results}, the model {expected}, after a batch:\n{trace}"
    assert await real.state(state) == state, f"the log and the model differ after a batch:\n{trace}"
    return state


async def replay(settings: Settings, pool: OnePool, model: Model, actions: str) -> None:
    """Performs a sequence of actions, as :meth:`Action.of` reads them; those that ``&`` joins are a batch."""
    real, state = RealLog(settings, pool, model.sizes), model.start()
    await real.create()
    path: list[Action] = []
    for text in actions.split(","):
        together = [Action.of(one) for one in text.split("&")]
        path.extend(together)
        if len(together) > 1:
            state = await check_batch(real, model, state, together, path)
        else:
            step = model.apply(View(state), together[0])
            await check(real, model, step, path)
            state = step.after


BATCH = 4


class Walk:
    """A random sequence of steps, on an execution of its own that is undone afterwards."""

    def __init__(self, settings: Settings, pool: OnePool, model: Model, *, fanout: bool) -> None:
        self._real = RealLog(settings, pool, model.sizes, fanout=fanout)
        self._pool = pool
        self._model = model
        self._state = model.start()
        self._path: list[Action] = []

    async def go(self, choose: Choose, steps: int) -> None:
        """Walks; ``choose`` selects one of several numbers."""
        async with undone(self._pool):
            await self._real.create()
            for _ in range(steps):
                options = list(self._model.steps(self._state))
                changing = [step for step in options if step.after != self._state]
                if changing and choose(range(4)):  # mostly, so that the walk gets on
                    options = changing
                step = options[choose(range(len(options)))]
                kind = step.action.name
                same = [one.action for one in options if one.action.name == kind]
                if kind in ("issue", "end") and len(same) > 1 and choose(range(2)):
                    batch = [same[choose(range(len(same)))] for _ in range(BATCH)]
                    self._path.extend(batch)
                    self._state = await check_batch(self._real, self._model, self._state, batch, self._path)
                elif kind == "claim" and len(same) > 1 and choose(range(2)):
                    await self._claim_any()
                else:
                    await self._take(step)

    async def _take(self, step: Step) -> None:
        self._path.append(step.action)
        await check(self._real, self._model, step, self._path)
        self._state = step.after

    async def _claim_any(self) -> None:
        """Claims whatever the log gives first."""
        place = await self._real.claim_any()
        assert place is not None, f"commands wait, and none was claimed: {self._path}"
        self._path.append(Action("claim", place))
        self._state = self._model.apply(View(self._state), self._path[-1]).after
        assert await self._real.state(self._state) == self._state, self._path
