"""Fan-out: one command a shard, groups of shards for Dagster, one fan-in (seed P3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from noetl_dagster.engine.attempts import Attempts
from noetl_dagster.engine.gather import gather
from noetl_dagster.engine.issue import issue
from noetl_dagster.engine.loop import run_workers
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.step import STEP_ERRORS, Entry, Steps
from noetl_dagster.events.queries import FANIN_COUNT
from noetl_dagster.events.state import StepEnd
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


@dataclass(frozen=True, slots=True)
class Group:
    """A contiguous run of shards, ``start <= index < stop``: one dynamic output of the Dagster run."""

    start: int
    stop: int

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
    """What a group did in this run."""

    group: Group
    done: int
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Expanded:
    """Outcome of expanding a fan-out: its groups, or the end of a step that had nothing to fan out."""

    groups: tuple[Group, ...] = ()
    end: StepEnd | None = None
    total: int = 0


class Fanouts:
    """The three parts of a fan-out step: expand, run a group, fan in."""

    def __init__(self, runtime: Runtime, steps: Steps) -> None:
        self._runtime = runtime
        self._steps = steps
        self._attempts = Attempts(runtime)

    async def expand(self, execution: Execution, step: str, visit: int = 1) -> Expanded:
        """Evaluates the collection, issues one command a shard and splits the shards into groups.

        Expanding again gives the same groups and issues nothing twice.
        """
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return Expanded(end=ended)
        program = execution.program.step(step)
        async with self._steps.entering(execution, program, visit) as entry:
            return await self._expand(execution, program, visit, entry)

    async def _expand(
        self, execution: Execution, program: StepProgram, visit: int, entry: Entry
    ) -> Expanded:
        if entry.end is not None:
            return Expanded(end=entry.end)
        try:
            activation = await self._steps.loops.activate(execution, program, visit, shard=True)
        except STEP_ERRORS as error:
            return Expanded(end=await self._steps.fail(execution, program, visit, error))
        total = len(activation.items)
        async for _ in issue(self._runtime, activation, 0, total):
            pass
        return Expanded(groups=tuple(_groups(program, total)), total=total)

    async def run_group(
        self, execution: Execution, step: str, group: Group, visit: int = 1
    ) -> GroupReport:
        """Runs the shards of a group that the log does not say are done, failed ones again within limits."""
        program = execution.program.step(step)
        activation = await self._steps.loops.activate(execution, program, visit, shard=True)
        loop = program.step.loop
        assert loop is not None
        pending = [command async for command, _ in issue(self._runtime, activation, group.start, group.stop)]
        waiting = iter(pending)
        counts = {"done": 0, "failed": 0}
        retries = loop.fanout.max_shard_retries
        stopped = False

        async def work() -> None:
            nonlocal stopped
            for command in waiting:
                if stopped:
                    return
                outcome = await self._run_shard(execution, program, command, retries)
                counts["failed" if outcome.failed else "done"] += 1
                if outcome.failed and (loop.fail_fast or loop.fanout.fail_fast):
                    stopped = True

        await run_workers(work, max(1, min(loop.fanout.max_concurrent, len(pending))))
        await self._runtime.buffer.flush()
        return GroupReport(group, **counts, skipped=group.stop - group.start - len(pending))

    async def fan_in(self, execution: Execution, step: str, visit: int = 1) -> StepEnd:
        """Counts the shards in the log, writes ``loop.fanin.completed`` once, and routes.

        When the fan-in of an earlier epoch had failed, its failed shards are tried again first.
        """
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return ended
        program = execution.program.step(step)
        activation = await self._steps.loops.activate(execution, program, visit, shard=True)
        total = len(activation.items)
        if activation.continues:
            await self.run_group(execution, step, Group(0, total), visit)
        await self._runtime.buffer.flush()
        result = await gather(self._runtime, execution.id, step, activation.loop_ids, total)
        await self._steps.loops.finish(activation, result)
        return await self._steps.end_loop(execution, program, visit, result)

    async def run(self, execution: Execution, step: str, visit: int = 1) -> StepEnd:
        """All three parts in one process, as the walker needs them."""
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return ended
        program = execution.program.step(step)
        async with self._steps.entering(execution, program, visit) as entry:
            expanded = await self._expand(execution, program, visit, entry)
            if expanded.end is not None:
                return expanded.end
            for group in expanded.groups:
                await self.run_group(execution, step, group, visit)
            return await self.fan_in(execution, step, visit)

    async def count(self, execution_id: int, step: str, loop_id: str) -> tuple[int, int]:
        """Shards done and failed (attempts) of one activation, by the seed's fan-in query."""
        row = await self._runtime.pool.fetchrow(FANIN_COUNT, execution_id, step, loop_id)
        return int(row["done"]), int(row["failed"])

    async def _run_shard(
        self, execution: Execution, program: StepProgram, command: Command, retries: int
    ) -> Outcome:
        """Runs a shard; a failed one is issued again as the next attempt of the same shard."""
        values: dict[str, Any] = {}
        for remaining in range(retries, -1, -1):
            final = remaining == 0
            outcome = await self._runtime.runner.run(
                execution, program, command, values=values, is_final=lambda outcome, final=final: final
            )
            if not outcome.failed or final:
                return outcome
            values = {}
            command = replace(command, attempt=command.attempt + 1)
            kind = program.tasks[0].task.kind if program.tasks else "noop"
            await self._runtime.buffer.append([self._runtime.commands.issued(command, kind)])
        raise AssertionError("unreachable")


def _groups(program: StepProgram, total: int) -> list[Group]:
    """Contiguous groups, each large enough to keep ``max_concurrent`` shards in flight."""
    loop = program.step.loop
    assert loop is not None
    wanted = min(loop.fanout.max_groups, -(-total // loop.fanout.max_concurrent))
    if wanted == 0:
        return []
    size, longer = divmod(total, wanted)
    groups, start = [], 0
    for place in range(wanted):
        stop = start + size + (place < longer)
        groups.append(Group(start, stop))
        start = stop
    return groups
