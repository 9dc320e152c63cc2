"""Issues the commands of a loop in bulk, leaving out what the log says is issued or done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from noetl_dagster.engine.loops.collection import Collection, Partitions
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.queries import LOOP_ATTEMPTS
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram

SLICE = 500
"""Commands issued in one round trip."""


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation of a loop as its commands need it.

    Attributes:
        loop_ids: this activation's id last, those that it continues before.
        items: the collection.
        resumed: an earlier run of the same activation may have issued or ended commands.
    """

    execution: Execution
    program: StepProgram
    visit: int
    loop_ids: tuple[str, ...]
    items: Collection
    shard: bool = False
    resumed: bool = False

    @property
    def loop_id(self) -> str:
        return self.loop_ids[-1]

    @property
    def continues(self) -> bool:
        """Whether an earlier activation of the same visit ended with failures that this one mends."""
        return len(self.loop_ids) > 1

    @property
    def step(self) -> str:
        return self.program.step.name

    def command(self, index: int, item: Any, attempt: int = 1) -> Command:
        state = self.execution.state
        return Command(
            execution_id=state.execution_id,
            step=self.step,
            visit=self.visit,
            attempt=attempt,
            index=index,
            item=item,
            length=self.items.length,
            loop_id=self.loop_id,
            shard=self.shard,
            part=self.shard and self.program.retries,
            iter_key=self.iter_key(index, item),
            catalog_id=state.catalog_id,
            parent_execution_id=state.parent_execution_id,
        )

    def iter_key(self, index: int, item: Any) -> str | None:
        """The key that the playbook gives a shard; None: its index.

        Raises:
            TemplateError: the key cannot be rendered for this item.
        """
        loop = self.program.step.loop
        if (
            not self.shard
            or loop is None
            or loop.fanout.iter_key is None
            or isinstance(self.items, Partitions)
        ):
            return None
        return str(compile_value(loop.fanout.iter_key).render({loop.iterator: item, "_index": index}))


async def issue(
    runtime: Runtime, activation: Activation, start: int, stop: int
) -> AsyncIterator[list[Command]]:
    """Issues the commands of a range of items, slice by slice, and gives those that are to run.

    Iterations that the log says are done are left out; failed ones get a new attempt. Commands are given only
    when they are in the log; of a fan-out, the next slice is made while one is being written.

    Raises:
        ExecutionCancelledError: the execution was cancelled meanwhile; the rest is not issued.
    """
    ahead = 1 if activation.shard else 0
    writing: deque[tuple[asyncio.Future[set[int]], list[Command]]] = deque()
    for begin in range(start, stop, SLICE):
        end = min(begin + SLICE, stop)
        known = await _known(runtime, activation, begin, end) if activation.resumed else {}
        commands, events = [], []
        for index, item in enumerate(await activation.items.slice(begin, end), begin):
            attempt, done, ended = known.get(index, (0, False, 0))
            if done:
                continue
            if attempt and activation.program.retries:
                # its attempts are one sequence, which goes on from the log
                commands.append(activation.command(index, item))
                continue
            pending = attempt > ended
            command = activation.command(index, item, attempt if pending else ended + 1)
            commands.append(command)
            if not pending:
                events.extend(issue_events(runtime, activation, command))
        writing.append((asyncio.ensure_future(runtime.buffer.append(events)), commands))
        while len(writing) > ahead:
            if issued := await _written(writing):
                yield issued
    while writing:
        if issued := await _written(writing):
            yield issued


async def _written(writing: deque[tuple[asyncio.Future[set[int]], list[Command]]]) -> list[Command]:
    """The commands of the first slice, as soon as they are in the log."""
    landed, commands = writing.popleft()
    await landed
    return commands


def issue_events(runtime: Runtime, activation: Activation, command: Command) -> list[Event]:
    """The two events with which a command of a loop is issued."""
    item = runtime.commands.item(command)
    if _is_small(command.item):
        item.current_item = command.item
    return [item, runtime.commands.issued(command, activation.program.kind)]


def _is_small(item: Any) -> bool:
    """Scalars and short mappings are copied into the event for people; the collection has them all."""
    if isinstance(item, (int, float, bool)):
        return True
    return (
        len(item) <= 256
        if isinstance(item, str)
        else isinstance(item, dict)
        and len(item) <= 8
        and all(
            isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) <= 128)
            for value in item.values()
        )
    )


async def _known(
    runtime: Runtime, activation: Activation, start: int, stop: int
) -> dict[int, tuple[int, bool, int]]:
    """By index: latest attempt, whether the iteration is done for sure, latest attempt that ended."""
    # a success of a shard, or of a sequence of attempts, may be one of several: what ends those says so
    by_command = not activation.shard and not activation.program.retries
    rows = await runtime.pool.fetch(
        LOOP_ATTEMPTS, activation.execution.id, list(activation.loop_ids), start, stop
    )
    return {
        row["current_index"]: (
            row["attempt"],
            row["shard_done"] or (by_command and row["done"]),
            row["ended"] or 0,
        )
        for row in rows
    }
