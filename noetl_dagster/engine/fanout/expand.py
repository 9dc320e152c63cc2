"""Fan-out: one command for each shard, groups of shards for Dagster, one fan-in."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from noetl_dagster.engine.fanout.shards import Group, GroupReport, run_here
from noetl_dagster.engine.fanout.spark import run_on_spark
from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.gather import gather
from noetl_dagster.engine.loops.loop_run import LoopRun, begin_loop
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.step import Steps, VisitEntry
from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import StepEnd
from noetl_dagster.playbook.models import FanoutEngine
from noetl_dagster.worker.execution import Execution, Visit
from noetl_dagster.worker.pipeline import TASK_ERRORS

KEYS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Expanded:
    """Outcome of the expansion of a fan-out: its groups, or the end of a step that failed or was skipped."""

    groups: tuple[Group, ...] = ()
    end: StepEnd | None = None
    total: int = 0
    loop_run: LoopRun | None = None


class Fanouts:
    """The three parts of a fan-out step: expansion, running a group, fan-in."""

    def __init__(self, runtime: Runtime, steps: Steps) -> None:
        self._runtime = runtime
        self._steps = steps

    async def expand(self, execution: Execution, step: str) -> Expanded:
        """Evaluates the items and returns the groups of shards, which issue their commands as they run."""
        async with self._steps.entering(execution, step) as entry:
            return await self._expand(execution, step, entry)

    async def _expand(self, execution: Execution, step: str, entry: VisitEntry) -> Expanded:
        if entry.end is not None:
            return Expanded(end=entry.end)
        visit = execution.visit(step)
        try:
            loop_run = await begin_loop(self._runtime, visit, shard=True)
            await _check_keys(loop_run)
        except TASK_ERRORS as error:
            return Expanded(end=await self._steps.fail(visit, error))
        total = len(loop_run.items)
        return Expanded(groups=tuple(_groups(visit, total)), total=total, loop_run=loop_run)

    async def run_group(
        self, execution: Execution, step: str, group: Group, loop_run: LoopRun | None = None
    ) -> GroupReport:
        """Issues and runs the shards of a group that are not done, on the engine that the playbook names."""
        visit = execution.visit(step)
        loop_run = loop_run or await begin_loop(self._runtime, visit, shard=True)
        if _on_spark(visit):
            return await run_on_spark(loop_run, group)
        return await run_here(loop_run, group)

    async def fan_in(self, execution: Execution, step: str) -> StepEnd:
        """Gathers the shards from the log and routes. Shards that failed in an earlier epoch are tried again first."""
        visit = execution.visit(step)
        if visit.end is not None:
            return visit.end
        loop_run = await begin_loop(self._runtime, visit, shard=True)
        total = len(loop_run.items)
        if loop_run.continues and total:
            await self.run_group(execution, step, Group(0, total))
        await self._runtime.buffer.flush(execution.id)
        flat = isinstance(loop_run.items, Partitions)
        return await self._steps.end_loop(visit, await gather(loop_run, flat=flat))

    async def run(self, execution: Execution, step: str) -> StepEnd:
        """Runs all three parts in one process, for the walker."""
        async with self._steps.entering(execution, step) as entry:
            expanded = await self._expand(execution, step, entry)
            if expanded.end is not None:
                return expanded.end
            if expanded.total:  # one group: several are only useful to ops of a Dagster run
                await self.run_group(execution, step, Group(0, expanded.total), expanded.loop_run)
            return await self.fan_in(execution, step)


def _on_spark(visit: Visit) -> bool:
    return visit.program.loop.fanout.engine is FanoutEngine.SPARK


async def _check_keys(loop_run: LoopRun) -> None:
    """Refuses shards with the same key, since their results and sinks would be mixed up.

    Only hashes are held: 29 MB for a million keys at the peak, where the keys themselves take 127 MB.
    """
    if loop_run.program.loop.fanout.iter_key is None or isinstance(loop_run.items, Partitions):
        return
    hashes = array("q")
    async for _, key in _keys(loop_run):
        hashes.append(hash(key))
    if not _has_twins(hashes):
        return
    seen: dict[str, int] = {}
    async for index, key in _keys(loop_run):
        first = seen.setdefault(key, index)
        if first != index:
            raise ToolError(
                f"step {loop_run.step}: items {first} and {index} have the same iter_key {key!r}; "
                "give fanout.iter_key a template that tells them apart, or leave it out to use the index",
                kind="loop",
            )


async def _keys(loop_run: LoopRun) -> AsyncIterator[tuple[int, str]]:
    for start in range(0, len(loop_run.items), KEYS_AT_ONCE):
        for index, item in enumerate(await loop_run.items.slice(start, start + KEYS_AT_ONCE), start):
            yield index, loop_run.iter_key(index, item) or ""


def _has_twins(numbers: array[int]) -> bool:
    """Reports that a number occurs twice. In rare cases different keys have equal hashes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ordered = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)]).sort()
    return bool(pc.any(pc.equal(ordered[1:], ordered[:-1])).as_py())


def _groups(visit: Visit, total: int) -> Iterator[Group]:
    """Yields contiguous groups, each large enough for the allowed number of shards in flight."""
    program = visit.program
    wanted = min(program.loop.fanout.max_groups, -(-total // program.shards_in_flight))
    if total and _on_spark(visit):
        wanted = 1  # one Spark job, which makes slices of its own
    start = 0
    for place in range(wanted):
        size, longer = divmod(total, wanted)
        stop = start + size + (place < longer)
        yield Group(start, stop)
        start = stop
