"""Runs of loops: their start, which continues an earlier run if the log has one, and their commands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from noetl_dagster.engine.loops.collection import (
    Collection,
    Partitions,
    evaluate_collection,
    keep_collection,
    kept_collection,
)
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.queries import LOOP_ATTEMPTS
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Visit

SLICE = 500
"""Commands issued in one round trip."""


@dataclass(frozen=True, slots=True)
class LoopRun(Visit):
    """One run of a visit's loop, with the facts that its commands need.

    Attributes:
        loop_ids: this run's id last, after those that it continues.
        resumed: an earlier process may have issued or ended commands of the same run.
    """

    runtime: Runtime
    loop_ids: tuple[str, ...]
    items: Collection
    shard: bool = False
    resumed: bool = False

    @property
    def loop_id(self) -> str:
        """The id of this run."""
        return self.loop_ids[-1]

    @property
    def continues(self) -> bool:
        """Reports that an earlier run of the visit's loop ended with failures, which this one tries again."""
        return len(self.loop_ids) > 1

    def iteration(self, index: int, item: Any, attempt: int = 1) -> Command:
        """Makes the command of an iteration."""
        return self.command(
            attempt=attempt,
            index=index,
            item=item,
            length=self.items.length,
            loop_id=self.loop_id,
            shard=self.shard,
            part=self.shard and self.program.retries,
            iter_key=self.iter_key(index, item),
        )

    def iter_key(self, index: int, item: Any) -> str | None:
        """Returns the key that the playbook gives a shard; None: its index."""
        loop = self.program.loop
        if not self.shard or loop.fanout.iter_key is None or isinstance(self.items, Partitions):
            return None
        return str(compile_value(loop.fanout.iter_key).render({loop.iterator: item, "_index": index}))


async def begin_loop(
    runtime: Runtime,
    visit: Visit,
    *,
    shard: bool = False,
    items: Collection | None = None,
    resumes: bool = True,
) -> LoopRun:
    """Returns the loop run that an earlier process began, or a new one, with its ``loop.started`` event.

    A loop run that ended with failures is continued by a new one, which inherits what was done: ``loop.done`` stays
    unique for each loop id.

    Args:
        items: of a loop whose items are not known beforehand; default: the loop's collection.
        resumes: false: always a new loop run.

    Raises:
        ToolError: the collection is not a list.
        TemplateError: the collection cannot be rendered.
    """
    execution, program, state = visit.execution, visit.program, visit.execution.state
    starts = state.loops.get((visit.step, visit.number), [])
    loop_ids = tuple(entry.loop_id for entry in starts)
    context = starts[-1].context if starts else {}
    if items is None and starts:
        items = kept_collection(runtime, context)
    if starts and items is not None and resumes and (not starts[-1].done or starts[-1].epoch == state.epoch):
        return LoopRun(execution, program, visit.number, runtime, loop_ids, items, shard, resumed=True)
    loop_id = str(runtime.ids.next())
    if items is None:
        evaluated = await evaluate_collection(runtime, program, visit.scope(ReferenceCache()))
        partitions = program.partitions if shard else None
        context = await keep_collection(runtime, visit, evaluated, loop_id, partitions)
        items = kept_collection(runtime, context)
    ids, resumed = (*loop_ids, loop_id), resumes and bool(starts)
    loop_run = LoopRun(execution, program, visit.number, runtime, ids, items, shard, resumed)
    meta: dict[str, Any] = {
        "loop_id": loop_id,
        "visit": visit.number,
        "epoch": state.epoch,
        "mode": program.loop.mode.value,
        ("total_shards" if shard else "collection_size"): len(items),
    }
    if program.loop.mode is LoopMode.STREAM:
        meta["source"] = execution.program.graph.fed_by.get(visit.step)
    if loop_run.continues:
        meta["continues"] = loop_ids[-1]
    type_ = EventType.LOOP_FANOUT_STARTED if shard else EventType.LOOP_STARTED
    event = runtime.event(state, type_, visit.step, "loop", "started", meta)
    event.context, event.current_index = context, 0
    await runtime.buffer.append([event])
    state.apply(event)
    return loop_run


async def issue(loop_run: LoopRun, start: int, stop: int, *, urgent: bool = True) -> AsyncIterator[list[Command]]:
    """Issues the commands of a range of items in bulk, slice by slice, and yields those that are to run.

    Leaves out iterations that are done in the log; failed ones get a new attempt. Yields commands when they are in
    the log. A fan-out makes the next slice while one is being written. Raises :class:`ExecutionCancelledError`.
    """
    buffer, ahead = loop_run.runtime.buffer, 1 if loop_run.shard else 0
    writing: deque[tuple[asyncio.Future[set[int]], list[Command]]] = deque()
    for begin in range(start, stop, SLICE):
        end = min(begin + SLICE, stop)
        progress = await _progress_of(loop_run, begin, end) if loop_run.resumed else {}
        commands, events = [], []
        for index, item in enumerate(await loop_run.items.slice(begin, end), begin):
            attempt, done, ended = progress.get(index, (0, False, 0))
            if done:
                continue
            if attempt and loop_run.program.retries:
                # its attempts are one sequence, which resumes from the log
                commands.append(loop_run.iteration(index, item))
                continue
            pending = attempt > ended
            command = loop_run.iteration(index, item, attempt if pending else ended + 1)
            commands.append(command)
            if not pending:
                events.extend(issue_events(loop_run, command))
        written = asyncio.ensure_future(buffer.append(events)) if urgent else buffer.begin(events, urgent=False)
        writing.append((written, commands))
        while len(writing) > (ahead if end < stop else 0):
            earlier, commands = writing.popleft()
            await earlier
            if commands:
                yield commands


def issue_events(loop_run: LoopRun, command: Command) -> list[Event]:
    """Makes the two events that issue a command of a loop."""
    make, shown = loop_run.runtime.commands, command.item if _is_small(command.item) else None
    return [make.item(command, shown), make.issued(command, loop_run.program.kind)]


def _is_small(item: Any) -> bool:
    """Selects scalars and short mappings, which are copied into the event for people to read."""
    if isinstance(item, dict):
        return len(item) <= 8 and all(_is_scalar(value, 128) for value in item.values())
    return _is_scalar(item, 256)


def _is_scalar(value: Any, length: int) -> bool:
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) <= length)


async def _progress_of(loop_run: LoopRun, start: int, stop: int) -> dict[int, tuple[int, bool, int]]:
    """Returns by index: the latest attempt, a flag that the iteration is done, the latest attempt that ended."""
    # a success of a shard, or of a sequence of attempts, may be one of several; another event ends those
    by_command = not loop_run.shard and not loop_run.program.retries
    place, lost = (loop_run.execution.id, list(loop_run.loop_ids)), loop_run.has_lost_results
    return {
        row["current_index"]: (
            row["attempt"],
            row["shard_done"] or (by_command and row["done"]),
            row["ended"] or 0,
        )
        for row in await loop_run.runtime.reads.fetch(LOOP_ATTEMPTS, *place, start, stop, lost)
    }
