"""Runs the shards of a fan-out in this process, one command for each shard or for each partition of the items."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from noetl_dagster.engine.loops.attempts import SHARD_RETRY, Attempts
from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.loop import SharedCommands, run_side_by_side, shared_items
from noetl_dagster.engine.loops.loop_run import LoopRun
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import ItemSource, Tally
from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope
from noetl_dagster.events.queries import COMMAND_END, LOOP_FAILED
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.runner import Call

FAIL_FAST_SECONDS = 1.0
"""How often a group checks for failures of other groups."""

COLLECT_AFTER = 50_000
"""New objects after which the garbage collector runs while shards run."""

ERRORS_SHOWN = 3
ITEMS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Group:
    """A contiguous range of shards, ``start <= index < stop``: one dynamic output of the Dagster run."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> str:
        """Mapping key of the dynamic output: first and last index, so that keys sort like the items."""
        return f"{self.start:07d}_{self.stop - 1:07d}"

    @classmethod
    def parse(cls, key: str) -> Group:
        """Reads a mapping key."""
        start, last = key.split("_")
        return cls(int(start), int(last) + 1)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The counts of a group in this run. ``skipped``: shards done before, or left out by ``fail_fast``."""

    group: Group
    done: int
    failed: int
    skipped: int
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Shards a second."""
        return (self.done + self.failed) / self.seconds if self.seconds else 0.0


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes the garbage collector run less often: shards make many objects and hardly any cycles."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], COLLECT_AFTER), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def run_here(loop_run: LoopRun, group: Group) -> GroupReport:
    """Runs the shards of a group that are not done in the log, ``max_concurrent`` at once."""
    started, slots = perf_counter(), loop_run.program.shards_in_flight
    with shared_items(loop_run, group.start, group.stop, slots) as items:
        tally = await work_on_shards(loop_run, items)
    skipped = max(0, len(group) - tally.done - tally.failed)
    return GroupReport(group, tally.done, tally.failed, skipped, perf_counter() - started)


async def work_on_shards(loop_run: LoopRun, items: ItemSource) -> Tally:
    """Runs this process's part of a group, waits for the other processes, and returns the counts of all of them."""
    loop, runtime = loop_run.program.loop, loop_run.runtime
    fail_fast = loop.fail_fast or loop.fanout.fail_fast
    done = failed = 0
    commands = SharedCommands(loop_run, items)
    pause = commands.paused if fail_fast else nullcontext

    async def has_failed() -> bool:
        return bool(await runtime.reads.fetchval(LOOP_FAILED, loop_run.execution.id, loop_run.loop_id))

    async def iterate(command: Command, again: bool) -> Outcome:
        nonlocal done, failed
        outcome = await _run_shard(loop_run, command, again, pause)
        done, failed = done + (not outcome.failed), failed + outcome.failed
        if outcome.failed and fail_fast:
            items.stop()
        return outcome

    async def watch() -> None:
        while not await has_failed():  # noqa: ASYNC110 - another process's event
            await asyncio.sleep(FAIL_FAST_SECONDS)
        items.stop()

    if fail_fast and await has_failed():
        items.stop()
    watcher = asyncio.create_task(watch()) if fail_fast else None
    try:
        with rare_collections():
            others = await commands.run(iterate)
    finally:
        if watcher is not None:
            watcher.cancel()
    await runtime.buffer.flush(loop_run.execution.id)
    return others + Tally(done, failed)


async def _run_shard(
    loop_run: LoopRun, command: Command, again: bool, pause: Callable[[], AbstractContextManager[None]]
) -> Outcome:
    """Runs a shard; after a failure its next attempt is issued."""
    runtime, program, items = loop_run.runtime, loop_run.program, loop_run.items
    retries = program.loop.fanout.max_shard_retries
    if command.part:
        return await Attempts(runtime, loop_run, command, retries).run(issued=True, resumed=again)
    last = command.attempt + retries
    runner = runtime.runner_of(program)
    if isinstance(items, Partitions):
        runner = PartitionRunner(runtime, items)

    def is_final(outcome: Outcome) -> bool:
        return command.attempt >= last

    while True:
        outcome = await runner.run(Call(loop_run, command, is_final=is_final))
        if outcome.failed:
            with pause() if command.attempt >= last else nullcontext():
                await runtime.buffer.flush(command.execution_id)
                place = (command.execution_id, command.command_id)
                record = await runtime.reads.fetchrow(COMMAND_END, *place)
                if record is not None:  # another process may have completed it
                    outcome = Outcome.of(record)
        if not outcome.failed or command.attempt >= last:
            return outcome
        command = replace(command, attempt=command.attempt + 1)
        await runtime.buffer.append([runtime.commands.issued(command, program.kind, retry=SHARD_RETRY)])


class PartitionRunner:
    """Runs the command of a partition: its tasks run once for each item, ``max_concurrent`` at once.

    The log holds events for each partition instead of each item, which makes 10^6 and more items cheap. A partition
    fails when one of its items does, and is tried again as a whole.
    """

    def __init__(self, runtime: Runtime, partitions: Partitions) -> None:
        self._runtime = runtime
        self._collection = partitions.collection

    async def run(self, call: Call) -> Outcome:
        """Claims and runs an issued command. The result is the list of its items' results, in order."""
        return await self._runtime.runner.traced(call, lambda span: self._run(call))

    async def _run(self, call: Call) -> Outcome:
        runtime, command = self._runtime, call.command
        await runtime.buffer.post([runtime.commands.claimed(command)])
        started = perf_counter()
        with runtime.heartbeats.beating(command):
            try:
                outcome = await self._run_items(call)
            except (ToolError, StorageError) as error:
                outcome = Outcome(error_envelope(error))
        outcome.duration = perf_counter() - started
        await runtime.buffer.post([runtime.commands.ended(command, outcome, final=call.is_final(outcome))])
        return outcome

    async def _run_items(self, call: Call) -> Outcome:
        visit, command = call.visit, call.command
        start, stop = command.item["start"], command.item["stop"]
        items = await self._collection.slice(start, stop)
        runner, total = self._runtime.runner, len(self._collection)
        outcomes: list[Outcome | None] = [None] * len(items)
        waiting = deque(enumerate(items))

        async def work() -> None:
            while waiting:
                place, item = waiting.popleft()
                one = Command(  # replace() would take a large part of an item's time
                    command.execution_id,
                    command.step,
                    visit=command.visit,
                    attempt=command.attempt,
                    index=start + place,
                    item=item,
                    length=total,
                    loop_id=command.loop_id,
                    catalog_id=command.catalog_id,
                    parent_execution_id=command.parent_execution_id,
                    owner=command.command_id,
                )
                outcomes[place] = await runner.outcome(Call(visit, one), ReferenceCache())

        at_once = visit.program.loop.fanout.max_concurrent or ITEMS_AT_ONCE
        await run_side_by_side(work, max(1, min(at_once, len(items))))
        ended = [outcome for outcome in outcomes if outcome is not None]
        _raise_failures(ended, start)
        patches = [patch for outcome in ended for patch in outcome.patches]
        data: Envelope = {"status": OK, "data": [_listed_result(outcome.envelope) for outcome in ended]}
        return Outcome(await self._runtime.result_writer.seal(data, command, None), patches)


def _raise_failures(outcomes: list[Outcome], start: int) -> None:
    failed = [(start + place, outcome.error) for place, outcome in enumerate(outcomes) if outcome.failed]
    if not failed:
        return
    shown = "; ".join(f"item {index}: {message}" for index, message in failed[:ERRORS_SHOWN])
    raise ToolError(
        f"{len(failed)} of {len(outcomes)} items failed: {shown}",
        kind="loop",
        retryable=any(outcome.retryable for outcome in outcomes),
    )


def _listed_result(envelope: Envelope) -> Any:
    """Returns an item's result within the list: its data, or its envelope if the data is stored."""
    reference = envelope.get("ref")
    if reference is None:
        return envelope.get("data")
    if isinstance(reference, ResultRef):
        reference = reference.model_dump(mode="json", exclude_defaults=True)
    return envelope | {"ref": reference}
