"""A worker's cache of executions: each is loaded once per version, however many of its commands run at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.events.types import Event
from noetl_dagster.pool_worker.control import ControlPlane
from noetl_dagster.worker.context import Grant
from noetl_dagster.worker.execution import Execution

MOST_CACHED = 64


class Executions:
    """States of executions by their versions."""

    def __init__(self, runtime: Runtime, control: ControlPlane) -> None:
        self._runtime = runtime
        self._control = control
        self._known: OrderedDict[int, tuple[str, asyncio.Task[Execution]]] = OrderedDict()

    def known(self) -> dict[int, str]:
        """Returns the versions of the cached executions: the answer to a claim omits their states."""
        return {execution_id: version for execution_id, (version, _) in self._known.items()}

    def learn(self, execution_id: int, version: str, events: Sequence[Event]) -> None:
        """Stores the state that came with a claim."""
        known, loading = self._known.get(execution_id, ("", None))
        if loading is not None and known == version and not _failed(loading):
            return
        self._remember(execution_id, version, asyncio.create_task(self._assemble(execution_id, events)))

    async def of(self, grant: Grant) -> Execution:
        """Returns the execution in the version in which the command was claimed.

        Raises:
            NoetlError: it cannot be loaded, or its playbook is invalid.
        """
        version, loading = self._known.get(grant.execution_id, ("", None))
        if loading is None or version != grant.state_version or _failed(loading):
            loading = asyncio.create_task(self._load(grant.execution_id))
            self._remember(grant.execution_id, grant.state_version, loading)
        else:
            self._known.move_to_end(grant.execution_id)
        return await asyncio.shield(loading)

    def _remember(self, execution_id: int, version: str, loading: asyncio.Task[Execution]) -> None:
        self._known[execution_id] = (version, loading)
        self._known.move_to_end(execution_id)
        while len(self._known) > MOST_CACHED:
            self._known.popitem(last=False)

    async def _load(self, execution_id: int) -> Execution:
        return await self._assemble(execution_id, await self._control.lifecycle(execution_id))

    async def _assemble(self, execution_id: int, events: Sequence[Event]) -> Execution:
        state = ExecutionState.fold(execution_id, list(events))
        return await self._runtime.assemble(state, self._control.source)


def _failed(loading: asyncio.Task[Execution]) -> bool:
    return loading.done() and (loading.cancelled() or loading.exception() is not None)
