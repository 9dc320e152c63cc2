"""Runs two writers on connections of their own, and decides statement by statement which of them continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from noetl_dagster.settings import Settings
from tests.events.model.one_pool import OnePool
from tests.events.model.real import RealLog
from tests.events.model.states import Action, Sizes
from tests.waiting import until

IN_ONE_STATEMENT = frozenset(
    {"enter", "start", "issue", "enqueue", "withdraw", "end_loop", "exit", "claim", "release", "end", "beat", "chunk"}
)
"""Actions that the product commits at once. Here they stay open until their writer continues."""

BLOCKED = "SELECT $2 = ANY(pg_blocking_pids($1))"


@dataclass
class Writer:
    """A process that performs an action and stops before each statement and each commit."""

    connection: Any
    pid: int = 0
    deadlocks: int = 0
    statement: str | None = None  # before which it stops
    task: asyncio.Task[str] | None = None
    _go: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, settings: Settings, sizes: Sizes, before: RealLog, action: Action) -> None:
        """Begins the action, on an execution that another log has prepared."""
        self.pid = self.connection.get_server_pid()
        pool = OnePool(self.connection, self._stop)
        real = RealLog(settings, pool, sizes, fanout=before.fanout, by_name=before.by_name, node=self.pid)
        real.beside(before)
        self.task = asyncio.create_task(self._perform(real, pool, action))

    async def _perform(self, real: RealLog, pool: OnePool, action: Action) -> str:
        while True:
            try:
                if action.name not in IN_ONE_STATEMENT:
                    return await real.perform(action)
                async with pool.transaction():
                    return await real.perform(action)
            except asyncpg.DeadlockDetectedError:  # as every writer, it tries again
                self.deadlocks += 1

    async def _stop(self, statement: str) -> None:
        self.statement = statement
        self._go.clear()
        await self._go.wait()

    def go(self) -> None:
        """Lets the statement run before which the writer stopped."""
        self.statement = None
        self._go.set()

    @property
    def is_done(self) -> bool:
        """Reports that the action is over."""
        return self.task is not None and self.task.done()


@dataclass(frozen=True)
class Interleaving:
    """What happened: who ran in each turn, and the results of both writers."""

    turns: tuple[int, ...]  # 0: the one that ran before, if it can
    choices: tuple[int, ...]  # how many writers could have had each turn
    results: tuple[str, str]
    deadlocks: int


async def interleave(onlooker: Any, writers: tuple[Writer, Writer], schedule: Sequence[int]) -> Interleaving:
    """Runs both writers to their ends. ``schedule`` selects those that run first; then one runs as long as it can."""
    turns, choices, last = [], [], 0
    while True:
        await _settle(onlooker, writers)
        able = [place for place, writer in enumerate(writers) if writer.statement is not None]
        if not able:
            break
        able.sort(key=lambda place: place != last)
        choice = schedule[len(turns)] if len(turns) < len(schedule) else 0
        turns.append(choice)
        choices.append(len(able))
        last = able[choice]
        writers[last].go()
    results = [await writer.task for writer in writers if writer.task is not None]
    return Interleaving(tuple(turns), tuple(choices), (results[0], results[1]), sum(one.deadlocks for one in writers))


async def _settle(onlooker: Any, writers: tuple[Writer, Writer]) -> None:
    """Waits until each writer has stopped, is done, or waits for a lock of the other one."""

    async def is_settled() -> bool:
        for place, writer in enumerate(writers):
            if writer.statement is None and not writer.is_done:
                other = writers[1 - place]
                if other.statement is None and not other.is_done:
                    return False  # it waits as well: a deadlock, which PostgreSQL ends
                if not await onlooker.fetchval(BLOCKED, writer.pid, other.pid):
                    return False
        return True

    for _ in range(20):  # most statements take less than a look at the locks
        if all(writer.statement is not None or writer.is_done for writer in writers):
            return
        await asyncio.sleep(0)
    await until(is_settled, "a writer to stop")


def following(done: Interleaving, switches: int) -> list[int] | None:
    """Returns the next schedule in order after one that was run, or None after the last one.

    Args:
        switches: how often at most a writer gives its turn to the other one although it can continue.
    """
    turns = list(done.turns)
    while turns:
        last = turns.pop()
        if last + 1 < done.choices[len(turns)] and sum(turns[1:]) < switches + (not turns):
            return [*turns, last + 1]
    return None
