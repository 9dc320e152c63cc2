"""Reads and settings of a step, which are determined once when the step is entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import AssetNotFoundError, PlaybookError, TemplateError, ToolError
from noetl_dagster.events.envelopes import OK, to_result
from noetl_dagster.events.queries import ASSET_PARTITIONS, ASSET_RESULT, ASSET_SPAN, PARTITION_RESULT
from noetl_dagster.events.types import Event
from noetl_dagster.playbook.assets import Key, Partition, ReadPartition, SourceSpec, key_text
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.playbook.templates.views import ReferenceCache
from noetl_dagster.storage.codec import byte_length
from noetl_dagster.storage.store import fits_inline
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram

Kept = dict[str, Any]
"""A result as the log holds it, with its asset, partition, execution and event."""

FindExternalResult = Callable[[Key, str | None], Awaitable[Kept | None]]
"""Finds the result of an asset that no playbook has made, or of one of its partitions; None if there is none."""


async def reads_of(
    runtime: Runtime, execution: Execution, program: StepProgram, visit: int
) -> dict[str, Kept]:
    """Returns by name the results of other assets that a visit of a step reads.

    Raises:
        AssetNotFoundError: an asset has no result, or none of the requested partition.
    """
    step = program.step
    known = execution.state.reads.get((step.name, visit))
    if known is not None or not step.sources:
        return known or {}
    reader, playbook = _AssetReader(runtime, execution, step.name), execution.playbook
    return {
        name: await reader.read(source.model_copy(update={"asset": playbook.key_of(source.asset)}))
        for name, source in step.sources.items()
    }


class _AssetReader:
    def __init__(self, runtime: Runtime, execution: Execution, step: str) -> None:
        self._runtime = runtime
        self._id, self._step = execution.id, step
        own = execution.state.partition
        self._own = Partition.model_validate(own) if own is not None else None

    async def read(self, source: SourceSpec) -> Kept:
        match source.partition:
            case ReadPartition.ALL:
                found = await self._all(source.asset)
            case ReadPartition.LATEST:
                found = await self._one(source.asset, None)
            case ReadPartition.SAME:
                found = await self._same(source.asset)
            case key:
                found = await self._one(source.asset, key)
        if found is None:
            raise AssetNotFoundError(await self._missing(source))
        return found

    async def _same(self, asset: Key) -> Kept | None:
        """Reads the execution's partition, or one of its dimensions; or the latest of an asset without any."""
        if self._own is None:
            return await self._one(asset, None)
        for key in dict.fromkeys((self._own.key, *(part.key for part in self._own.parts.values()))):
            found = await self._one(asset, key)
            if found is not None:
                return found
        found = await self._one(asset, None)
        return found if found is not None and found.get("partition") is None else None

    async def _one(self, asset: Key, partition: str | None) -> Kept | None:
        pool, name = self._runtime.pool, key_text(asset)
        if partition is None:
            row = await pool.fetchrow(ASSET_RESULT, name)
        else:
            row = await pool.fetchrow(PARTITION_RESULT, name, partition)
        if row is not None:
            return _kept(asset, row)
        find = self._runtime.find_external
        return None if find is None else await find(asset, partition)

    async def _all(self, asset: Key) -> Kept | None:
        rows = await self._runtime.pool.fetch(ASSET_PARTITIONS, key_text(asset))
        if not rows:
            return None
        found = {row["partition"]: row["result"] for row in rows}
        if fits_inline(byte_length(found), self._runtime.settings):
            return {"asset": key_text(asset), "partitions": found}
        # a year of small results would make every ``step.enter`` megabytes long
        reference = await self._runtime.results.put(
            found, execution_id=self._id, step=self._step, name=f"reads_{key_text(asset)}"
        )
        kept = to_result({"status": OK, "ref": reference})
        return {"asset": key_text(asset), "keys": list(found), "result": kept}

    async def _missing(self, source: SourceSpec) -> str:
        name = key_text(source.asset)
        span = await self._runtime.pool.fetchrow(ASSET_SPAN, name)
        wanted = source.partition
        if wanted == ReadPartition.SAME and self._own is not None:
            wanted = self._own.key
        if span["results"] == 0:
            return f"asset {name} has no result yet; run the playbook or the job that makes it"
        if span["first"] is None:
            return f"asset {name} has no partitions, and {wanted!r} of it is wanted; read it with partition: latest"
        return (
            f"asset {name} has no partition {wanted!r}; it has {span['partitions']}, "
            f"from {span['first']} to {span['last']}"
        )


def _kept(asset: Key, row: Mapping[str, Any]) -> Kept:
    return {
        "asset": key_text(asset),
        "partition": row["partition"],
        "execution_id": str(row["execution_id"]),
        "event_id": str(row["event_id"]),
        "result": row["result"],
    }


async def settings_of(
    runtime: Runtime, execution: Execution, program: StepProgram, visit: int, entered: Event
) -> dict[str, Any]:
    """Returns the settings of a visit, by their location in the step.

    Raises:
        TemplateError: one cannot be rendered.
        ToolError: one has a value that is not allowed; the message names it and the allowed values.
    """
    step = program.step.name
    known = execution.state.settings.get((step, visit))
    if known is not None or not program.settings:
        return known or {}
    scope = execution.scope(ReferenceCache(), step, entered)
    settings = {}
    for name, template in program.settings.items():
        try:
            settings[name] = await render_async(compile_value(template), scope, runtime.results.get)
        except TemplateError as error:
            raise TemplateError(f"step {step}: {name} cannot be settled: {error}") from None
    try:
        execution.program.step_with(step, settings, execution.state.workload)
    except PlaybookError as error:
        wrong = "; ".join(str(problem) for problem in error.problems if problem.severity == "error")
        raise ToolError(wrong, kind="schema", code="SETTING") from None
    return settings
