"""Fan-out: one command for each shard, groups of shards for Dagster, one fan-in."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass

from noetl_dagster.engine.fanout.shards import Group, GroupReport, InlineShards, ShardEngine
from noetl_dagster.engine.fanout.spark import SparkShards
from noetl_dagster.engine.loops.activation import Activation, activate, finish
from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.gather import gather
from noetl_dagster.engine.loops.issue import issue
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.step import Steps, VisitEntry
from noetl_dagster.errors import ToolError
from noetl_dagster.events.queries import FANIN_COUNT
from noetl_dagster.events.state import StepEnd
from noetl_dagster.playbook.models import FanoutEngine
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.pipeline import TASK_ERRORS
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.spans import step_names

KEYS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Expanded:
    """Outcome of the expansion of a fan-out: its groups, or the end of a step that failed or was skipped."""

    groups: tuple[Group, ...] = ()
    end: StepEnd | None = None
    total: int = 0


class Fanouts:
    """The three parts of a fan-out step: expansion, running a group, fan-in."""

    def __init__(self, runtime: Runtime, steps: Steps) -> None:
        self._runtime = runtime
        self._steps = steps
        inline = InlineShards(runtime)
        self._engines: dict[FanoutEngine, ShardEngine] = {
            FanoutEngine.DAGSTER: inline,
            FanoutEngine.WORKERS: inline,
            FanoutEngine.SPARK: SparkShards(runtime),
        }

    async def expand(self, execution: Execution, step: str, visit: int = 1) -> Expanded:
        """Evaluates the collection, issues one command for each shard and splits the shards into groups.

        A repeated expansion returns the same groups and issues nothing twice.
        """
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return Expanded(end=ended)
        program = execution.program.step(step)
        async with self._steps.entering(execution, program, visit) as entry:
            return await self._expand(execution, program, visit, entry)

    async def _expand(
        self, execution: Execution, program: StepProgram, visit: int, entry: VisitEntry
    ) -> Expanded:
        if entry.end is not None:
            return Expanded(end=entry.end)
        program = execution.step(program.step.name, visit)
        try:
            activation = await activate(self._runtime, execution, program, visit, shard=True)
            await _check_keys(activation)
        except TASK_ERRORS as error:
            return Expanded(end=await self._steps.fail(execution, program, visit, error))
        total = len(activation.items)
        if not _on_spark(program):  # Spark's tasks issue the commands of their slices themselves
            async for _ in issue(self._runtime, activation, 0, total):
                pass
            await self._runtime.buffer.flush()
        return Expanded(groups=tuple(_groups(program, total)), total=total)

    async def run_group(self, execution: Execution, step: str, group: Group, visit: int = 1) -> GroupReport:
        """Runs the shards of a group on the engine that the playbook names."""
        program = execution.step(step, visit)
        activation = await activate(self._runtime, execution, program, visit, shard=True)
        loop = program.loop
        return await self._engines[loop.fanout.engine].run(activation, group)

    async def fan_in(self, execution: Execution, step: str, visit: int = 1) -> StepEnd:
        """Counts the shards in the log, writes ``loop.fanin.completed`` once, and routes.

        When the fan-in of an earlier epoch had failed, its failed shards are tried again first.
        """
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return ended
        program = execution.step(step, visit)
        activation = await activate(self._runtime, execution, program, visit, shard=True)
        total = len(activation.items)
        if activation.continues and total:
            await self.run_group(execution, step, Group(0, total), visit)
        await self._runtime.buffer.flush()
        flat = isinstance(activation.items, Partitions)
        result = await gather(self._runtime, execution.id, step, activation.loop_ids, total, flat=flat)
        await finish(self._runtime, activation, result)
        return await self._steps.end_loop(execution, program, visit, result)

    async def run(self, execution: Execution, step: str, visit: int = 1) -> StepEnd:
        """Runs all three parts in one process, for the walker."""
        ended = execution.state.end_of(step, visit)
        if ended is not None:
            return ended
        program = execution.program.step(step)
        with LogContext(
            execution_id=execution.id, step=step, **step_names(execution.trace, execution.state, step, visit)
        ):
            async with self._steps.entering(execution, program, visit) as entry:
                expanded = await self._expand(execution, program, visit, entry)
                if expanded.end is not None:
                    return expanded.end
                if expanded.total:  # one group: several are only useful to ops of a Dagster run
                    await self.run_group(execution, step, Group(0, expanded.total), visit)
                return await self.fan_in(execution, step, visit)

    async def count(self, execution_id: int, step: str, loop_id: str) -> tuple[int, int]:
        """Returns the shards done and failed (attempts) of one activation."""
        row = await self._runtime.pool.fetchrow(FANIN_COUNT, execution_id, step, loop_id)
        return int(row["done"]), int(row["failed"])


def _on_spark(program: StepProgram) -> bool:
    loop = program.step.loop
    return loop is not None and loop.fanout.engine is FanoutEngine.SPARK


async def _check_keys(activation: Activation) -> None:
    """Refuses shards with the same key, since their results and sinks would be mixed up.

    Only hashes are held: 29 MB for a million keys at the peak, where the keys themselves take 127 MB.

    Raises:
        ToolError: names the first two items that share a key.
        TemplateError: a key cannot be rendered.
    """
    loop = activation.program.step.loop
    if loop is None or loop.fanout.iter_key is None or isinstance(activation.items, Partitions):
        return
    hashes = array("q")
    async for _, key in _keys(activation):
        hashes.append(hash(key))
    if not _has_twins(hashes):
        return
    seen: dict[str, int] = {}
    async for index, key in _keys(activation):
        first = seen.setdefault(key, index)
        if first != index:
            raise ToolError(
                f"step {activation.step}: items {first} and {index} have the same iter_key {key!r}; "
                "give fanout.iter_key a template that tells them apart, or leave it out to use the index",
                kind="loop",
            )


async def _keys(activation: Activation) -> AsyncIterator[tuple[int, str]]:
    for start in range(0, len(activation.items), KEYS_AT_ONCE):
        for index, item in enumerate(await activation.items.slice(start, start + KEYS_AT_ONCE), start):
            yield index, activation.iter_key(index, item) or ""


def _has_twins(numbers: array[int]) -> bool:
    """Reports that a number occurs twice. In rare cases different keys have equal hashes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ordered = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)]).sort()
    return bool(pc.any(pc.equal(ordered[1:], ordered[:-1])).as_py())


def _groups(program: StepProgram, total: int) -> list[Group]:
    """Returns contiguous groups, each large enough for the allowed number of shards in flight."""
    loop = program.loop
    if total and _on_spark(program):
        return [Group(0, total)]  # one Spark job, which makes slices of its own
    wanted = min(loop.fanout.max_groups, -(-total // program.shards_in_flight))
    if wanted == 0:
        return []
    size, longer = divmod(total, wanted)
    groups, start = [], 0
    for place in range(wanted):
        stop = start + size + (place < longer)
        groups.append(Group(start, stop))
        start = stop
    return groups
