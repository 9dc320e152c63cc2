"""Shards of many items: a partition is one command whose tasks run once for each of its items.

The log then holds events a partition, not an item: what makes 10^6 and more items cheap. A partition fails
when one of its items does, and is tried again as a whole.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from noetl_dagster.engine.loops.collection import Partitions
from noetl_dagster.engine.loops.loop import run_workers
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope, error_envelope
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.command import Command, Outcome
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram
from noetl_dagster.worker.runner import Call

ERRORS_SHOWN = 3
ITEMS_AT_ONCE = 64


class PartitionRunner:
    """Runs the command of a partition: its items, one after another or ``max_concurrent`` at once."""

    def __init__(self, runtime: Runtime, partitions: Partitions) -> None:
        self._runtime = runtime
        self._partitions = partitions

    async def run(self, call: Call) -> Outcome:
        """Claims and runs an issued command. Its result is the list of its items' results, in order."""
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
                one = Command(  # replace() would take a good part of an item's time
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

        loop = program.step.loop
        at_once = (loop.fanout.max_concurrent if loop is not None else None) or ITEMS_AT_ONCE
        await run_workers(work, max(1, min(at_once, len(items))))
        ended = [outcome for outcome in outcomes if outcome is not None]
        _refuse_failures(ended, start)
        patches = [patch for outcome in ended for patch in outcome.patches]
        data: Envelope = {"status": OK, "data": [_kept(outcome.envelope) for outcome in ended]}
        return await self._runtime.sealer.seal(data, command, None), patches


def _refuse_failures(outcomes: list[Outcome], start: int) -> None:
    failed = [(start + place, outcome.error) for place, outcome in enumerate(outcomes) if outcome.failed]
    if not failed:
        return
    shown = "; ".join(f"item {index}: {message}" for index, message in failed[:ERRORS_SHOWN])
    raise ToolError(
        f"{len(failed)} of {len(outcomes)} items failed: {shown}",
        kind="loop",
        retryable=any(outcome.retryable for outcome in outcomes),
    )


def _kept(envelope: Envelope) -> Any:
    """An item's result within the list: its data, or its envelope where the data is stored elsewhere."""
    reference = envelope.get("ref")
    if reference is None:
        return envelope.get("data")
    if isinstance(reference, ResultRef):
        reference = reference.model_dump(mode="json", exclude_defaults=True)
    return envelope | {"ref": reference}
