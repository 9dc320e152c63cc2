"""Shards of a fan-out run in this process: the ``dagster`` engine, and the seam for the others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from noetl_dagster.engine.crew.team import Share, Tally
from noetl_dagster.engine.fanout.partitions import PartitionRunner
from noetl_dagster.engine.loops.attempts import Attempts
from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.issue import Activation
from noetl_dagster.engine.loops.loop import SharedCommands, team_of
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.envelopes import from_result
from noetl_dagster.events.queries import COMMAND_END, LOOP_FAILED
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.runner import Call, Runner

FAIL_FAST_SECONDS = 1.0
"""How often a group looks whether another group has failed."""

COLLECT_AFTER = 50_000
"""New objects after which the garbage collector looks for cycles while shards run."""


@dataclass(frozen=True, slots=True)
class Group:
    """A contiguous run of shards, ``start <= index < stop``: one dynamic output of the Dagster run."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> str:
        """Mapping key of the dynamic output: first and last index, in order of the items."""
        return f"{self.start:07d}_{self.stop - 1:07d}"

    @classmethod
    def parse(cls, key: str) -> Group:
        start, last = key.split("_")
        return cls(int(start), int(last) + 1)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a group did in this run. ``skipped``: shards done before, or left out by ``fail_fast``."""

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
    """Runs the shards of one group to their ends; what ``spec.fanout.engine`` chooses."""

    async def run(self, activation: Activation, group: Group) -> GroupReport:
        """Runs the shards that the log does not say are done, failed ones again within limits."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets the garbage collector look less often: shards make many objects and hardly any cycles."""
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
        program = activation.program
        started = asyncio.get_running_loop().time()
        with team_of(self._runtime, activation, group.start, group.stop, program.shards_in_flight) as share:
            tally = await self.work(activation, share)
        seconds = asyncio.get_running_loop().time() - started
        skipped = max(0, len(group) - tally.done - tally.failed)
        return GroupReport(group, tally.done, tally.failed, skipped=skipped, seconds=seconds)

    async def work(self, activation: Activation, share: Share) -> Tally:
        """Runs this process's share of a group and waits for the others; what all of them did."""
        loop = activation.program.step.loop
        assert loop is not None
        spec = loop.fanout
        fail_fast = loop.fail_fast or spec.fail_fast
        done = failed = 0
        commands = SharedCommands(self._runtime, activation, share)
        pause = commands.paused if fail_fast else nullcontext
        if fail_fast and await self._failed_elsewhere(activation):
            share.stop()

        async def work() -> None:
            nonlocal done, failed
            while (found := await commands.next()) is not None:
                command, again = found
                outcome = await self._run_shard(
                    activation, command, spec.max_shard_retries, again=again, pause=pause
                )
                if not outcome.failed:
                    done += 1
                    continue
                failed += 1
                if fail_fast:
                    share.stop()

        async def watch() -> None:
            while not await self._failed_elsewhere(activation):  # noqa: ASYNC110 - another process's event
                await asyncio.sleep(FAIL_FAST_SECONDS)
            share.stop()

        watcher = asyncio.create_task(watch()) if fail_fast else None
        try:
            with rare_collections():
                others = await share.run(work)
        finally:
            if watcher is not None:
                watcher.cancel()
        await self._runtime.buffer.flush()
        return others + Tally(done, failed)

    async def _failed_elsewhere(self, activation: Activation) -> bool:
        found = await self._runtime.pool.fetchval(LOOP_FAILED, activation.execution.id, activation.loop_id)
        return bool(found)

    async def _standing(self, command: Command, outcome: Outcome) -> Outcome:
        """The end that the log has for a command that failed here: another driver of it may have done it."""
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
        """Runs a shard; a failed one is issued again as the next attempt of the same shard."""
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
                    outcome = await self._standing(command, outcome)
            if not outcome.failed or command.attempt >= last:
                return outcome
            command = replace(command, attempt=command.attempt + 1)
            await self._runtime.buffer.append([self._runtime.commands.issued(command, program.kind)])
