"""Issues the commands of a loop in bulk, without those that are issued or done in the log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from noetl_dagster.engine.loops.activation import Activation
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.queries import LOOP_ATTEMPTS
from noetl_dagster.events.types import Event
from noetl_dagster.worker.command import Command

SLICE = 500
"""Commands issued in one round trip."""


async def issue(
    runtime: Runtime, activation: Activation, start: int, stop: int
) -> AsyncIterator[list[Command]]:
    """Issues the commands of a range of items, slice by slice, and yields those that are to run.

    Leaves out iterations that are done in the log; failed ones get a new attempt. Yields commands when they are in
    the log. A fan-out makes the next slice while one is being written.

    Raises:
        ExecutionCancelledError: the execution was cancelled meanwhile; the rest is not issued.
    """
    ahead = 1 if activation.shard else 0
    writing: deque[tuple[asyncio.Future[set[int]], list[Command]]] = deque()

    async def written() -> list[Command]:
        """Returns the commands of the first slice, as soon as they are in the log."""
        landed, commands = writing.popleft()
        await landed
        return commands

    for begin in range(start, stop, SLICE):
        end = min(begin + SLICE, stop)
        known = await _known(runtime, activation, begin, end) if activation.resumed else {}
        commands, events = [], []
        for index, item in enumerate(await activation.items.slice(begin, end), begin):
            attempt, done, ended = known.get(index, (0, False, 0))
            if done:
                continue
            if attempt and activation.program.retries:
                # its attempts are one sequence, which resumes from the log
                commands.append(activation.command(index, item))
                continue
            pending = attempt > ended
            command = activation.command(index, item, attempt if pending else ended + 1)
            commands.append(command)
            if not pending:
                events.extend(issue_events(runtime, activation, command))
        writing.append((asyncio.ensure_future(runtime.buffer.append(events)), commands))
        while len(writing) > ahead:
            if issued := await written():
                yield issued
    while writing:
        if issued := await written():
            yield issued


def issue_events(runtime: Runtime, activation: Activation, command: Command) -> list[Event]:
    """Makes the two events that issue a command of a loop."""
    item = runtime.commands.item(command)
    if _is_small(command.item):
        item.current_item = command.item
    return [item, runtime.commands.issued(command, activation.program.kind)]


def _is_small(item: Any) -> bool:
    """Selects scalars and short mappings, which are copied into the event for people to read."""
    if isinstance(item, dict):
        return len(item) <= 8 and all(_is_scalar(value, 128) for value in item.values())
    return _is_scalar(item, 256)


def _is_scalar(value: Any, length: int) -> bool:
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) <= length)


async def _known(
    runtime: Runtime, activation: Activation, start: int, stop: int
) -> dict[int, tuple[int, bool, int]]:
    """Returns by index: the latest attempt, a flag that the iteration is done, the latest attempt that ended."""
    # a success of a shard, or of a sequence of attempts, may be one of several; another event ends those
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
