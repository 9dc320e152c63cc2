"""Runs commands in the pool of workers, for the op that waits for their ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import DATABASE_AWAY, encode_json
from noetl_dagster.events.transport import queries
from noetl_dagster.process import log_context
from noetl_dagster.worker.command import CURRENT_ITEM_BYTES, Outcome
from noetl_dagster.worker.context import Shared, own_context
from noetl_dagster.worker.runner import Call

if TYPE_CHECKING:
    from noetl_dagster.engine.pool.link import Link


_FAILED = Outcome({"status": "error"})


class Dispatcher:
    """Runs commands in the pool. Connects on first use; one for each process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._opening = asyncio.Lock()
        self._link: Link | None = None

    async def run(self, call: Call) -> Outcome:
        """Queues an issued command for a worker and waits for its end.

        If the wait is cancelled, the command leaves the queue again, unless a worker has claimed it.
        """
        program, command = call.program, call.command
        from noetl_dagster.engine.pool.link import (
            DispatchRequest,  # imports NATS, which most executions do not need
        )

        link = await self._open()
        shared = Shared.of(command, final=call.is_final(_FAILED))
        context = await self._own_context(call)
        done = link.ends.expect(command.execution_id, command.command_id)
        step = program.step
        link.submit(
            DispatchRequest(command, shared, context, program.kind, step.worker_pool, step.spec, done)
        )
        try:
            outcome = await done
        except asyncio.CancelledError:
            with contextlib.suppress(*DATABASE_AWAY):
                await self._runtime.pool.execute(queries.WITHDRAW, command.execution_id, command.command_id)
            raise
        if call.values is not None:
            call.values.update(outcome.values)
        return outcome

    def unattended(self, execution_id: int, step: str) -> str | None:
        """Returns a message if commands of a step wait for a pool without workers, else None."""
        return None if self._link is None else self._link.unattended(execution_id, step)

    async def close(self) -> None:
        """Closes the connections, if it has opened any."""
        if self._link is not None:
            await self._link.close()
            self._link = None

    async def _open(self) -> Link:
        async with self._opening:
            if self._link is None:
                linking = asyncio.get_running_loop().create_task(self._connect(), context=log_context.empty())
                self._link = await linking
            return self._link

    async def _connect(self) -> Link:
        from noetl_dagster.engine.pool.link import Link
        from noetl_dagster.events.transport.nats import connect

        link = Link(self._runtime, await connect(self._runtime.settings, "dispatch"))
        await link.open()
        return link

    async def _own_context(self, call: Call) -> dict[str, Any]:
        """Returns the command's own context, as it is queued."""
        command, loop = call.command, call.program.step.loop
        more: dict[str, Any] = {}
        if call.values:
            more["values"] = call.values
        if loop is not None and loop.is_sequential:
            # the log has the values that earlier iterations set only when all are done
            more["ctx"] = call.execution.state.ctx
        if command.item is not None:
            if _is_small(command.item):
                more["item"] = command.item
            else:
                ref = await self._runtime.results.put(
                    command.item,
                    execution_id=command.execution_id,
                    step=command.step,
                    name=f"item-{command.loop_id}-{command.index}",
                )
                more["item_ref"] = ref.model_dump(mode="json")
        return own_context(command, **more)


def _is_small(item: Any) -> bool:
    return isinstance(item, (int, float)) or len(encode_json(item)) <= CURRENT_ITEM_BYTES
