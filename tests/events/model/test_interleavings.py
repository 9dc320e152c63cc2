"""Two writers at once: whatever the order of their statements, they do what one after the other does."""

from __future__ import annotations

from typing import Any

import pytest

from noetl_dagster.events.connection import open_pool
from noetl_dagster.events.ids import Snowflake
from noetl_dagster.settings import Settings
from tests.events.model.interleaving import Interleaving, Writer, following, interleave
from tests.events.model.one_pool import OnePool
from tests.events.model.real import Claim, RealLog
from tests.events.model.rules import Model
from tests.events.model.states import Action, Sizes, State, View

SIZES = Sizes(items=2, claims=2, epochs=3, releases=2, withdrawals=1, extras=True)

STARTED = "enter 1 1, start 1 1 1"
ISSUED = f"{STARTED}, issue 1 0 1"
QUEUED = f"{ISSUED}, enqueue 1 0 1"
CLAIMED = f"{QUEUED}, claim 1 0 1"
DUE = f"{CLAIMED}, lapse 1 0 1"
AGAIN = f"{DUE}, reap"
TWICE = f"{AGAIN}, claim 1 0 1"
LAST = f"{TWICE}, lapse 1 0 1"
ENDED = f"{CLAIMED}, end 1 0 1 by 1 done"
LOOPED = f"{ENDED}, end_loop 1 1"
EXITED = f"{LOOPED}, exit 1 1 done"
BURIED = f"{CLAIMED}, bury 1 0 1 by 1"

CRITICAL = [
    (STARTED, "issue 1 0 1", "issue 1 0 1"),
    (ISSUED, "enqueue 1 0 1", "cancel"),
    (QUEUED, "claim 1 0 1", "claim 1 0 1"),
    (DUE, "claim 1 0 1", "reap"),
    (TWICE, "end 1 0 1 by 1 done", "end 1 0 1 by 2 done"),
    (CLAIMED, "end 1 0 1 by 1 done", "end 1 0 1 by 1 failed"),
    (DUE, "end 1 0 1 by 1 done", "reap"),
    (AGAIN, "end 1 0 1 by 1 done", "claim 1 0 1"),
    (ENDED, "end_loop 1 1", "end_loop 1 1"),
    (QUEUED, "resume 1", "resume 1"),
    (EXITED, "resume 1", "finish 1 completed"),
]
OTHERS = [
    (STARTED, "issue 1 0 1", "cancel"),
    (ISSUED, "enqueue 1 0 1", "enqueue 1 0 1"),
    (QUEUED, "claim 1 0 1", "cancel"),
    (QUEUED, "claim 1 0 1", "withdraw 1 0 1"),
    (AGAIN, "withdraw 1 0 1", "end 1 0 1 by 1 done"),
    (LAST, "end 1 0 1 by 2 done", "reap"),
    (LAST, "reap", "reap"),
    (DUE, "reap", "reap"),
    (DUE, "beat 1 0 1 by 1", "reap"),
    (DUE, "release 1 0 1 by 1", "reap"),
    (CLAIMED, "release 1 0 1 by 1", "end 1 0 1 by 1 done"),
    (CLAIMED, "end 1 0 1 by 1 done", "cancel"),
    (CLAIMED, "end 1 0 1 by 1 done", "resume 1"),
    (CLAIMED, "chunk 1 0 1 by 1", "end 1 0 1 by 1 done"),
    (CLAIMED, "chunk 1 0 1 by 1", "chunk 1 0 1 by 1"),
    (AGAIN, "chunk 1 0 1 by 1", "claim 1 0 1"),
    (STARTED, "enter 1 1", "enter 1 1"),
    (LOOPED, "exit 1 1 done", "exit 1 1 done"),
    (EXITED, "finish 1 completed", "finish 1 completed"),
    (LOOPED, "exit 1 1 done", "cancel"),
    (EXITED, "finish 1 completed", "cancel"),
    (QUEUED, "resume 1", "cancel"),
    (CLAIMED, "cancel", "cancel"),
    (LAST, "cancel", "reap"),
    (CLAIMED, "bury 1 0 1 by 1", "bury 1 0 1 by 1"),
    (BURIED, "unearth 1 0 1 by 1", "unearth 1 0 1 by 1"),
    (BURIED, "unearth 1 0 1 by 1", "end 1 0 1 by 1 done"),
]
Seen = tuple[tuple[str, str], State, tuple[str, dict[int, str]]]


def in_turn(model: Model, state: State, actions: tuple[Action, Action]) -> list[Seen]:
    """Returns what may be seen after both actions: what one after the other leads to, in both orders."""
    seen = []
    for order in ((0, 1), (1, 0)):
        after, results = state, ["", ""]
        for place in order:
            step = model.apply(View(after), actions[place])
            results[place], after = step.result, step.after
        view = View(after)
        seen.append(((results[0], results[1]), after, (model.status(view), view.exits)))
    return seen


class Pair:
    """Two actions after a sequence of others, in every order of their statements."""

    def __init__(
        self,
        settings: Settings,
        before: str,
        first: str,
        second: str,
        *,
        fanout: bool = False,
        by_name: bool = True,
        switches: int = 3,
    ) -> None:
        self.settings = settings
        self.model = Model(SIZES)
        self.before = [Action.of(text) for text in before.split(", ")]
        self.actions = Action.of(first), Action.of(second)
        self.fanout, self.by_name = fanout, by_name
        self.switches = switches
        self.claim: Claim | None = None
        self.expected: list[Seen] = []
        self.count = 0

    async def run(self) -> None:
        """Runs every interleaving."""
        assert self.settings.db_url is not None
        state = self.model.start()
        for action in self.before:
            state = self.model.apply(View(state), action).after
        expected = self.expected or in_turn(self.model, state, self.actions)
        pool = await open_pool(self.settings.db_url, size=3)
        try:
            async with pool.acquire() as one, pool.acquire() as other, pool.acquire() as onlooker:
                schedule: list[int] | None = []
                while schedule is not None:
                    real = await self._prepared(onlooker)
                    writers = Writer(one), Writer(other)
                    for writer, action in zip(writers, self.actions, strict=True):
                        await writer.start(self.settings, SIZES, real, action)
                    done = await interleave(onlooker, writers, schedule)
                    self.count += 1
                    seen = done.results, await real.state(state), await real.status()
                    self._compare(done, seen, expected)
                    await onlooker.execute("DELETE FROM noetl.queue")
                    schedule = following(done, self.switches)
        finally:
            pool.terminate()

    async def _prepared(self, connection: Any) -> RealLog:
        real = RealLog(self.settings, OnePool(connection), SIZES, fanout=self.fanout, by_name=self.by_name)
        real.same_claim = self.claim
        async with connection.transaction():
            await real.create()
            for action in self.before:
                await real.perform(action)
        return real

    def _compare(self, done: Interleaving, seen: Seen, expected: list[Seen]) -> None:
        allowed = [
            one for one in expected if (one[0], one[1].log, one[1].rows, one[2]) == (seen[0], *seen[1][:2], seen[2])
        ]
        assert allowed, f"{self.actions} in the turns {done.turns}: {seen} is neither of {expected}"
        assert not done.deadlocks, f"{self.actions} in the turns {done.turns}: a deadlock"


@pytest.mark.parametrize(("before", "first", "second"), CRITICAL)
async def test_two_writers_do_what_one_after_the_other_does(
    settings: Settings, before: str, first: str, second: str
) -> None:
    pair = Pair(settings, before, first, second, switches=1)
    await pair.run()
    assert pair.count > 1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "first", "second"), [*CRITICAL, *OTHERS])
async def test_in_every_interleaving(settings: Settings, before: str, first: str, second: str) -> None:
    await Pair(settings, before, first, second).run()


async def test_one_of_two_writers_ends_a_fan_out(settings: Settings) -> None:
    await Pair(settings, ENDED, "end_loop 1 1", "end_loop 1 1", fanout=True, switches=1).run()


async def test_one_of_two_workers_claims_the_next_command(settings: Settings) -> None:
    await Pair(settings, QUEUED, "claim 1 0 1", "claim 1 0 1", by_name=False, switches=1).run()


async def test_a_claim_that_is_sent_twice_at_once_has_one_answer(settings: Settings) -> None:
    """Its worker, which had no answer in time, sends it again."""
    before = f"{QUEUED}, issue 1 1 1, enqueue 1 1 1"
    pair = Pair(settings, before, "claim 1 0 1", "claim 1 0 1", by_name=False, switches=1)
    pair.claim = Claim(Snowflake(9).next(), "w0")
    state = Model(SIZES).start()
    for action in pair.before:
        state = pair.model.apply(View(state), action).after
    claimed = pair.model.apply(View(state), Action.of("claim 1 0 1")).after
    pair.expected = [(("claimed", "claimed"), claimed, ("running", {}))]
    await pair.run()
