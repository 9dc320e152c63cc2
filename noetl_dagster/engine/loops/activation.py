"""Activations of loops: their beginning, which continues an earlier one where the log has one, and their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from noetl_dagster.engine.loops.collection import (
    Collection,
    Partitions,
    evaluate_collection,
    keep_collection,
    kept_collection,
)
from noetl_dagster.engine.loops.gather import LoopResult, iteration_ends
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.state import assign
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation of a loop, with the facts that its commands need.

    Attributes:
        loop_ids: this activation's id last, after those that it continues.
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
        """Id of this activation."""
        return self.loop_ids[-1]

    @property
    def continues(self) -> bool:
        """Reports that an earlier activation of the visit ended with failures, which this one tries again."""
        return len(self.loop_ids) > 1

    @property
    def step(self) -> str:
        """Name of the step."""
        return self.program.step.name

    def command(self, index: int, item: Any, attempt: int = 1) -> Command:
        """Makes the command of an iteration."""
        return self.execution.command(
            self.step,
            self.visit,
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
        """Returns the key that the playbook gives a shard; None: its index.

        Raises:
            TemplateError: the key cannot be rendered for this item.
        """
        if not self.shard or isinstance(self.items, Partitions):
            return None
        loop = self.program.loop
        if loop.fanout.iter_key is None:
            return None
        return str(compile_value(loop.fanout.iter_key).render({loop.iterator: item, "_index": index}))


async def activate(
    runtime: Runtime,
    execution: Execution,
    program: StepProgram,
    visit: int,
    *,
    shard: bool = False,
    items: Collection | None = None,
    resumes: bool = True,
) -> Activation:
    """Returns the activation that an earlier run began, or a new one, with its ``loop.started`` event.

    An activation that ended with failures is continued by a new one, which inherits what was done: ``loop.done`` stays
    unique for each loop id.

    Args:
        items: of a loop whose items are not known beforehand; default: the loop's collection.
        resumes: false: always a new activation.

    Raises:
        ToolError: the collection is not a list.
        TemplateError: the collection cannot be rendered.
    """
    step = program.step.name
    known = execution.state.loops.get((step, visit), [])
    loop_ids = tuple(entry.loop_id for entry in known)
    context = known[-1].context if known else {}
    if items is None and known:
        items = kept_collection(runtime, context)
    if known and items is not None and resumes:
        is_open = not known[-1].done or known[-1].epoch == execution.state.epoch
        if is_open:
            return Activation(execution, program, visit, loop_ids, items, shard, resumed=True)
    loop_id = str(runtime.ids.next())
    if items is None:
        evaluated = await evaluate_collection(runtime, program, execution.scope(ReferenceCache(), step))
        partitions = program.partitions if shard else None
        context, items = await keep_collection(
            runtime, execution, step, evaluated, loop_id, partitions=partitions
        )
    resumed = resumes and bool(known)
    activation = Activation(execution, program, visit, (*loop_ids, loop_id), items, shard, resumed)
    await _start(runtime, activation, context)
    return activation


async def _start(runtime: Runtime, activation: Activation, context: dict[str, Any]) -> None:
    state, loop = activation.execution.state, activation.program.loop
    meta: dict[str, Any] = {
        "loop_id": activation.loop_id,
        "visit": activation.visit,
        "epoch": state.epoch,
        "mode": loop.mode.value,
        ("total_shards" if activation.shard else "collection_size"): len(activation.items),
    }
    if loop.mode is LoopMode.STREAM:
        meta["source"] = activation.execution.program.graph.fed_by(activation.step)
    if activation.continues:
        meta["continues"] = activation.loop_ids[-2]
    type_ = EventType.LOOP_FANOUT_STARTED if activation.shard else EventType.LOOP_STARTED
    event = runtime.event(state, type_, activation.step, "loop", "started", meta)
    event.context, event.current_index = context, 0
    await runtime.buffer.append([event])
    state.apply(event)


async def finish(runtime: Runtime, activation: Activation, result: LoopResult) -> None:
    """Writes ``loop.done``, or ``loop.fanin.completed``; the log keeps the first."""
    state = activation.execution.state
    counts = {key: result.envelope[key] for key in ("total", "done", "failed")}
    if activation.shard:
        status = fanin_status(result.done, result.failed)
        type_, shape = EventType.LOOP_FANIN_COMPLETED, {"status": status, "context": counts}
    else:
        status = "completed"
        counts["completed"] = counts["done"]
        type_, shape = EventType.LOOP_DONE, {"status": result.envelope["status"], "context": counts}
    meta = {"loop_id": activation.loop_id, "collection_size": len(activation.items), **counts}
    event = runtime.event(state, type_, activation.step, "loop", status, meta)
    event.result = shape
    state.apply(event)
    await runtime.log.append_once(event)


def fanin_status(done: int, failed: int) -> str:
    """Returns ``complete``, ``partial`` or ``failed``."""
    if not failed:
        return "complete"
    return "partial" if done else "failed"


async def restore_context(runtime: Runtime, activation: Activation, stop: int) -> None:
    """Applies the writes to ctx of the iterations before an interruption to the state.

    Args:
        stop: the index after the last of them.
    """
    execution, sequences = activation.execution, activation.program.retries
    async for end in iteration_ends(runtime, execution.id, activation.loop_ids, 0, stop, sequences=sequences):
        for path, value in end.patches:
            assign(execution.state.ctx, path, value)
