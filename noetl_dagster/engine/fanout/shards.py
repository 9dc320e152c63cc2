"""Runs the shards of a fan-out in this process, one command for each shard or for each partition of the items."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

from noetl_dagster.engine.loops.activation import Activation
from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.loop import SharedCommands, run_items, run_side_by_side, shared_items
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.sharing import ItemSource, Tally
from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope, from_result
from noetl_dagster.events.queries import COMMAND_END, LOOP_FAILED
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.runner import Call, Runner

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


class ShardEngine(Protocol):
    """Runs the shards of one group to their ends; ``spec.fanout.engine`` selects one."""

    async def run(self, activation: Activation, group: Group) -> GroupReport:
        """Runs the shards that are not done in the log; failed ones again within limits."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes the garbage collector run less often: shards make many objects and hardly any cycles."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], COLLECT_AFTER), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class InlineShards:
    """Runs shards on this process's event loop, ``max_concurrent`` at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attempts = Attempts(runtime)

    async def run(self, activation: Activation, group: Group) -> GroupReport:
        """Runs a group; see :class:`ShardEngine`."""
        program = activation.program
        started = asyncio.get_running_loop().time()
        with shared_items(
            self._runtime, activation, group.start, group.stop, program.shards_in_flight
        ) as items:
            tally = await self.work(activation, items)
        seconds = asyncio.get_running_loop().time() - started
        skipped = max(0, len(group) - tally.done - tally.failed)
        return GroupReport(group, tally.done, tally.failed, skipped=skipped, seconds=seconds)

    async def work(self, activation: Activation, items: ItemSource) -> Tally:
        """Runs this process's part of a group, waits for the other processes, and returns the counts of all of them."""
        loop = activation.program.loop
        spec = loop.fanout
        fail_fast = loop.fail_fast or spec.fail_fast
        done = failed = 0
        commands = SharedCommands(self._runtime, activation, items)
        pause = commands.paused if fail_fast else nullcontext
        if fail_fast and await self._has_failed(activation):
            items.stop()

        async def iterate(command: Command, again: bool) -> Outcome:
            nonlocal done, failed
            outcome = await self._run_shard(
                activation, command, spec.max_shard_retries, again=again, pause=pause
            )
            done, failed = done + (not outcome.failed), failed + outcome.failed
            if outcome.failed and fail_fast:
                items.stop()
            return outcome

        async def watch() -> None:
            while not await self._has_failed(activation):  # noqa: ASYNC110 - another process's event
                await asyncio.sleep(FAIL_FAST_SECONDS)
            items.stop()

        watcher = asyncio.create_task(watch()) if fail_fast else None
        try:
            with rare_collections():
                others = await run_items(commands, iterate)
        finally:
            if watcher is not None:
                watcher.cancel()
        await self._runtime.buffer.flush()
        return others + Tally(done, failed)

    async def _has_failed(self, activation: Activation) -> bool:
        found = await self._runtime.pool.fetchval(LOOP_FAILED, activation.execution.id, activation.loop_id)
        return bool(found)

    async def _end_in_log(self, command: Command, outcome: Outcome) -> Outcome:
        """Returns the end that the log has for a command that failed here: another process may have completed it."""
        await self._runtime.buffer.flush()
        record = await self._runtime.pool.fetchrow(COMMAND_END, command.execution_id, command.command_id)
        return outcome if record is None else Outcome(from_result(record["result"]))

    def _runner(self, activation: Activation) -> Runner:
        if isinstance(activation.items, Partitions):
            return PartitionRunner(self._runtime, activation.items)
        return self._runtime.runner_of(activation.program)

    async def _run_shard(
        self,
        activation: Activation,
        command: Command,
        retries: int,
        *,
        again: bool,
        pause: Callable[[], AbstractContextManager[None]],
    ) -> Outcome:
        """Runs a shard; after a failure its next attempt is issued."""
        execution, program = activation.execution, activation.program
        if command.part:
            return await self._attempts.run(
                execution, program, command, issued=True, resumed=again, spare=retries
            )
        last = command.attempt + retries
        runner = self._runner(activation)

        def is_final(outcome: Outcome) -> bool:
            return command.attempt >= last

        while True:
            outcome = await runner.run(Call(execution, program, command, is_final=is_final))
            if outcome.failed:
                with pause() if command.attempt >= last else nullcontext():
                    outcome = await self._end_in_log(command, outcome)
            if not outcome.failed or command.attempt >= last:
                return outcome
            command = replace(command, attempt=command.attempt + 1)
            await self._runtime.buffer.append([self._runtime.commands.issued(command, program.kind)])


class PartitionRunner:
    """Runs the command of a partition: its tasks run once for each item, ``max_concurrent`` at once.

    The log holds events for each partition instead of each item, which makes 10^6 and more items cheap. A partition
    fails when one of its items does, and is tried again as a whole.
    """

    def __init__(self, runtime: Runtime, partitions: Partitions) -> None:
        self._runtime = runtime
        self._partitions = partitions

    async def run(self, call: Call) -> Outcome:
        """Claims and runs an issued command. The result is the list of its items' results, in order."""
        runtime, command = self._runtime, call.command
        span = runtime.runner.span(call.execution, command)
        if span is None:
            return await runtime.runner.cleared(command, self._run(call))
        with LogContext(
            execution_id=command.execution_id, command_id=command.command_id, step=command.step, **span.names
        ):
            outcome = await runtime.runner.cleared(command, self._run(call))
        span.ended(outcome, runtime.commands.worker_id)
        return outcome

    async def _run(self, call: Call) -> Outcome:
        runtime, command = self._runtime, call.command
        await runtime.buffer.post([runtime.commands.claimed(command)])
        started = perf_counter()
        with runtime.heartbeats.beating(command):
            try:
                envelope, patches = await self._run_items(call.execution, call.program, command)
            except (ToolError, StorageError) as error:
                envelope, patches = error_envelope(error), []
        outcome = Outcome(envelope, patches, duration=perf_counter() - started)
        await runtime.buffer.post([runtime.commands.ended(command, outcome, final=call.is_final(outcome))])
        return outcome

    async def _run_items(
        self, execution: Execution, program: StepProgram, command: Command
    ) -> tuple[Envelope, list[tuple[list[str], Any]]]:
        start, stop = command.item["start"], command.item["stop"]
        items = await self._partitions.collection.slice(start, stop)
        runner, total = self._runtime.runner, len(self._partitions.collection)
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
                outcomes[place] = await runner.outcome(execution, program, one, ReferenceCache())

        at_once = program.loop.fanout.max_concurrent or ITEMS_AT_ONCE
        await run_side_by_side(work, max(1, min(at_once, len(items))))
        ended = [outcome for outcome in outcomes if outcome is not None]
        _raise_failures(ended, start)
        patches = [patch for outcome in ended for patch in outcome.patches]
        data: Envelope = {"status": OK, "data": [_listed_result(outcome.envelope) for outcome in ended]}
        return await self._runtime.result_writer.seal(data, command, None), patches


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
