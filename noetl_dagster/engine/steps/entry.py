"""The entry into a visit of a step: one process drives it, and its reads and settings are determined once.

Two processes may reach the same visit: a run that was resumed twice, an op that Dagster started again. The process
whose ``step.enter`` is in the log works, and the others follow. The unique index on the turn, the number of the driver,
admits one. So a loop has one ``loop.done``, a command is issued and dispatched once, and the arcs fire once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import AssetNotFoundError, PlaybookError, TemplateError, ToolError
from noetl_dagster.events.envelopes import OK, to_result
from noetl_dagster.events.log import as_event
from noetl_dagster.events.queries import (
    ASSET_PARTITIONS,
    ASSET_RESULT,
    ASSET_SPAN,
    PARTITION_RESULT,
    STEP_CHECKS,
    STEP_EXIT,
    STEP_TURNS,
)
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.assets import Key, Partition, ReadPartition, SourceSpec, key_text
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.storage.codec import byte_length
from noetl_dagster.storage.store import fits_inline
from noetl_dagster.worker.command import own_worker_id
from noetl_dagster.worker.execution import Visit

Kept = dict[str, Any]
"""A result as the log holds it, with its asset, partition, execution and event."""

POLL_SECONDS = (0.02, 0.5)
"""Shortest and longest pause of a follower between two queries of the log."""

_alive: set[int] = set()
"""Ids of the ``step.enter`` events on which tasks of this process work, or which they try to write."""


class VisitDrivers:
    """Lets one process drive a visit; the others follow it, and one of them takes over when it dies."""

    def __init__(self, runtime: Runtime, liveness: Liveness) -> None:
        self._runtime = runtime
        self.liveness = liveness

    @asynccontextmanager
    async def turn(self, visit: Visit, entered: Event) -> AsyncIterator[int | None]:
        """Appends ``step.enter``, with the turn and a new id for each try, and drives the visit until the block ends.

        Yields:
            The number of the turn; None when another process has ended the visit, which is in the state now.
        """
        turn = 1
        while True:
            entered.meta["turn"] = turn
            entered.worker_id = own_worker_id()
            _alive.add(entered.event_id)
            try:
                if entered.event_id in await self._runtime.buffer.append([entered]):
                    yield turn
                    return
            finally:
                _alive.discard(entered.event_id)
            if await self._follow(visit):
                yield None
                return
            row = await self._runtime.reads.fetchrow(STEP_TURNS, *_place(visit))
            turn = (row["turn"] if row is not None else 0) + 1
            if row is not None and row["context"]:  # this driver uses the same reads as the one before
                entered.context = row["context"]
            entered.event_id = self._runtime.ids.next()

    async def apply_end(self, visit: Visit) -> bool:
        """Applies the end of a visit in the log to the state; returns true if there is one in this epoch."""
        reads, state = self._runtime.reads, visit.execution.state
        record = await reads.fetchrow(STEP_EXIT, *_place(visit))
        if record is None:
            return False
        for check in await reads.fetch(STEP_CHECKS, *_place(visit)):
            state.apply(as_event(check))
        state.apply(as_event(record))
        return True

    async def _follow(self, visit: Visit) -> bool:
        """Waits for the driver of a visit; returns true if it ended the visit, false if it is gone."""
        pause, longest = POLL_SECONDS
        while not await self.apply_end(visit):
            if not await self._driver_lives(visit):
                return await self.apply_end(visit)  # it may have ended the visit just before it died
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)
        return True

    async def _driver_lives(self, visit: Visit) -> bool:
        row = await self._runtime.reads.fetchrow(STEP_TURNS, *_place(visit))
        if row is None:
            return False
        if row["worker_id"] == own_worker_id():
            return row["event_id"] in _alive
        return await self.liveness.is_driven_by(visit.execution.id, row["worker_id"])


def _place(visit: Visit) -> tuple[int, str, str, str]:
    return visit.execution.id, visit.step, str(visit.number), str(visit.execution.state.epoch)


async def reads_of(runtime: Runtime, visit: Visit) -> dict[str, Kept]:
    """Returns by name the results of other assets that a visit of a step reads.

    Raises:
        AssetNotFoundError: an asset has no result, or none of the requested partition.
    """
    execution, step = visit.execution, visit.program.step
    logged = execution.state.reads.get((step.name, visit.number))
    if logged is not None or not step.sources:
        return logged or {}
    reader, playbook = _AssetReader(runtime, visit), execution.playbook
    return {
        name: await reader.read(source.model_copy(update={"asset": playbook.key_of(source.asset)}))
        for name, source in step.sources.items()
    }


class _AssetReader:
    def __init__(self, runtime: Runtime, visit: Visit) -> None:
        self._runtime = runtime
        self._visit = visit
        own = visit.execution.state.partition
        self._own = Partition.model_validate(own) if own is not None else None

    async def read(self, source: SourceSpec) -> Kept:
        match source.partition:
            case ReadPartition.ALL:
                result = await self._all(source.asset)
            case ReadPartition.LATEST:
                result = await self._one(source.asset, None)
            case ReadPartition.SAME:
                result = await self._same(source.asset)
            case key:
                result = await self._one(source.asset, key)
        if result is None:
            raise AssetNotFoundError(await self._missing(source))
        return result

    async def _same(self, asset: Key) -> Kept | None:
        """Reads the execution's partition, or one of its dimensions; or the latest of an asset without any."""
        if self._own is None:
            return await self._one(asset, None)
        for key in dict.fromkeys((self._own.key, *(part.key for part in self._own.parts.values()))):
            result = await self._one(asset, key)
            if result is not None:
                return result
        result = await self._one(asset, None)
        return result if result is not None and result.get("partition") is None else None

    async def _one(self, asset: Key, partition: str | None) -> Kept | None:
        reads, name = self._runtime.reads, key_text(asset)
        if partition is None:
            row = await reads.fetchrow(ASSET_RESULT, name)
        else:
            row = await reads.fetchrow(PARTITION_RESULT, name, partition)
        if row is None:
            find = self._visit.execution.services.find_asset
            return None if find is None else await find(asset, partition)
        ids = {key: str(row[key]) for key in ("execution_id", "event_id")}
        return {"asset": name, "partition": row["partition"], **ids, "result": row["result"]}

    async def _all(self, asset: Key) -> Kept | None:
        name = key_text(asset)
        rows = await self._runtime.reads.fetch(ASSET_PARTITIONS, name)
        if not rows:
            return None
        results = {row["partition"]: row["result"] for row in rows}
        if fits_inline(byte_length(results), self._runtime.settings):
            return {"asset": name, "partitions": results}
        # a year of small results would make every ``step.enter`` megabytes long, and so would the keys of 100,000
        execution_id, step, _ = self._visit.key
        reference = await self._runtime.results.put(results, execution_id=execution_id, step=step, name=f"reads_{name}")
        stored = to_result({"status": OK, "ref": reference})
        return {"asset": name, "count": len(results), "result": stored}

    async def _missing(self, source: SourceSpec) -> str:
        name, wanted = key_text(source.asset), source.partition
        span = await self._runtime.reads.fetchrow(ASSET_SPAN, name)
        if wanted == ReadPartition.SAME and self._own is not None:
            wanted = self._own.key
        if span["results"] == 0:
            return f"asset {name} has no result yet; run the playbook or the job that makes it"
        if span["first"] is None:
            return f"asset {name} has no partitions, so it has no partition {wanted!r}; read it with partition: latest"
        return (
            f"asset {name} has no partition {wanted!r}; it has {span['partitions']}, "
            f"from {span['first']} to {span['last']}"
        )


async def settings_of(runtime: Runtime, visit: Visit, entered: Event) -> dict[str, Any]:
    """Returns the settings of a visit, by their location in the step.

    Raises:
        TemplateError: one cannot be rendered.
        ToolError: one has a value that is not allowed; the message names it and the allowed values.
    """
    execution, step, templates = visit.execution, visit.step, visit.program.settings
    logged = execution.state.settings.get((step, visit.number))
    if logged is not None or not templates:
        return logged or {}
    scope = visit.scope(ReferenceCache(), entered)
    settings = {}
    for name, template in templates.items():
        try:
            settings[name] = await render_async(compile_value(template), scope, runtime.results.get)
        except TemplateError as error:
            raise TemplateError(f"step {step}: {name} cannot be rendered: {error}") from None
    try:
        execution.program.step_with(step, settings, execution.state.workload)
    except PlaybookError as error:
        wrong = "; ".join(str(problem) for problem in error.problems if problem.severity == "error")
        raise ToolError(wrong, kind="schema", code="SETTING") from None
    return settings
