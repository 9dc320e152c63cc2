"""The IO manager of playbook steps: their results are already stored and passed by reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    DagsterInvariantViolationError,
    InputContext,
    IOManager,
    MetadataValue,
    OutputContext,
)

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.io_managers import conversion
from noetl_dagster.io_managers.metadata import (
    LINEAGE,
    STORAGE_KIND,
    is_partitioned,
    storage_metadata,
    with_origins,
)
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.result_ref import REF_METADATA, RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import codec
from noetl_dagster.storage.codec import byte_length
from noetl_dagster.storage.store import ResultStore, fits_inline
from noetl_dagster.values import is_table

EXECUTION_TAG = "noetl/execution_id"
"""Run tag that names the execution a run belongs to."""

_RECENT = 20


class NoetlResultIOManager(IOManager):
    """Passes step results between assets by reference.

    ``handle_output`` of a :class:`ResultRef`, or of a step envelope that holds one, records metadata only.
    Any other value is stored first: in the reference itself if it is small, else in the tier for its size.
    ``load_input`` finds the reference in the asset's latest materialisation (that of the same run, if there
    is one) and returns the type of the input's annotation: the object, ``bytes``, ``str``, a path, a
    pandas, polars, Arrow or Spark table, or the ``ResultRef`` itself.

    Args:
        open_store: returns the store of this process, whose coroutines run on the background loop.
    """

    def __init__(self, open_store: Callable[[], ResultStore]) -> None:
        self._open_store = open_store

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """Records the metadata of a result; stores values that are no results yet."""
        ref, value = _reference_in(obj)
        if ref is None:
            ref = self._store_value(context, value)
        metadata = metadata_of(ref, partitioned=is_partitioned(context))
        step_metadata = context.output_metadata or {}
        if STORAGE_KIND in step_metadata:  # of the table that a step has written
            metadata.pop(STORAGE_KIND)
        context.add_output_metadata(with_origins(metadata, step_metadata.get(LINEAGE)))

    def load_input(self, context: InputContext) -> Any:
        """Loads a result as the input's annotation specifies; of several partitions a mapping by their keys."""
        if not context.has_asset_key:
            return self._load_op_output(context)
        partitions = context.asset_partition_keys if context.has_asset_partitions else []
        if len(partitions) > 1:
            return {key: self._load(context, self._materialised(context, key)) for key in partitions}
        return self._load(context, self._materialised(context, partitions[0] if partitions else None))

    def _store_value(self, context: OutputContext, value: Any) -> ResultRef:
        store = self._open_store()
        execution_id, step, name = _address(context)
        value = codec.admitted(value, f"output {context.name!r}")
        inline = not is_table(value) and fits_inline(byte_length(value), store.settings)
        extra = {"asset": context.asset_key.to_user_string()} if context.has_asset_key else {}
        return run_sync(
            store.put(
                value,
                execution_id=execution_id,
                step=step,
                name=name,
                tier=StoreTier.EVENTLOG if inline else None,
                extra=extra,
            )
        )

    def _load_op_output(self, context: InputContext) -> Any:
        upstream = context.upstream_output
        if upstream is None:
            raise StorageError(f"input {context.name!r} has no upstream output; give it a value in run config")
        execution_id, step, name = _address(upstream)
        ref = run_sync(self._open_store().find((execution_id, step, name)))
        return self._load(context, ref)

    def _materialised(self, context: InputContext, partition: str | None) -> ResultRef:
        """Returns the reference that the asset's materialisation names."""
        if (name := _latest_ref_name(context, partition)) is None:
            where = context.asset_key.to_user_string() + (f" [{partition}]" if partition else "")
            raise ReferenceNotAvailableError(
                f"asset {where} has no materialisation with a result; run the playbook step that makes it"
            )
        return run_sync(self._open_store().find(name))

    def _load(self, context: InputContext, ref: ResultRef) -> Any:
        wanted = conversion.kind_of_annotation(context.dagster_type.typing_type)
        store = self._open_store()
        match wanted:
            case "ref":
                return ref
            case "path" if ref.kind is RefKind.MANIFEST:
                return run_sync(_written(store, ref))
            case "path":
                return conversion.to_path(store.settings, ref)
            case "spark":
                return conversion.to_spark(store.settings, *run_sync(_tables(store, ref)))
            case "bytes" if ref.kind is not RefKind.DATASET:
                return run_sync(store.get_bytes(ref))
        return conversion.convert(run_sync(store.get(ref)), wanted, ref.ref)


async def _tables(store: ResultStore, ref: ResultRef) -> list[ResultRef]:
    """Returns the parts of a manifest whose value is one table; else the reference itself."""
    if ref.kind is not RefKind.MANIFEST or await store.content_type(ref) != codec.PARQUET:
        return [ref]
    parts = []
    async for part in store.parts(ref):
        parts += await _tables(store, part)
    return parts


async def _written(store: ResultStore, ref: ResultRef) -> Path:
    """Writes the value of a manifest to a file that is removed when the process ends."""
    extension = codec.EXTENSIONS[await store.content_type(ref)]
    path = conversion.passing_folder() / f"{ref.ref_id}{extension}"
    with path.open("wb") as file:
        async for data in store.stream(ref):
            await asyncio.to_thread(file.write, data)
    return path


def metadata_of(ref: ResultRef, *, partitioned: bool = False) -> dict[str, MetadataValue]:
    """Returns Dagster metadata of a reference, with the name by which :class:`NoetlResultIOManager` finds it."""
    return {REF_METADATA: MetadataValue.text(ref.ref), **storage_metadata(ref, partitioned=partitioned)}


def _reference_in(value: Any) -> tuple[ResultRef | None, Any]:
    """Returns the reference that a value is or contains; without one, the value to store (an envelope's data)."""
    if isinstance(value, ResultRef):
        return value, None
    if isinstance(value, dict) and "status" in value and value.keys() & {"ref", "reference", "data"}:
        held = value.get("ref") or value.get("reference")
        if held is None:
            return None, value.get("data")
        return ResultRef.model_validate(held), None
    return None, value


def _address(context: OutputContext) -> tuple[int, str, str]:
    """Returns execution, step and name under which an output's value is recorded."""
    if context.has_asset_key:
        tags = context.step_context.dagster_run.tags
        return int(tags.get(EXECUTION_TAG, 0)), context.asset_key.path[-1], "result"
    # op outputs are found by name: run, step and output identify them
    return 0, "dagster", ":".join(context.get_identifier())


def _latest_ref_name(context: InputContext, partition: str | None) -> str | None:
    asset_key: AssetKey = context.asset_key
    filters = AssetRecordsFilter(asset_key, asset_partitions=[partition] if partition else None)
    records = context.instance.fetch_materializations(filters, limit=_RECENT).records
    run_id = None
    with suppress(DagsterInvariantViolationError):  # an asset of another job
        if context.upstream_output is not None:  # made by this run, or by the re-executed one
            run_id = context.upstream_output.run_id
    own_first = sorted(records, key=lambda record: record.run_id != run_id)  # stable: newest first in each
    for record in own_first:
        materialization = record.asset_materialization
        if materialization is not None and REF_METADATA in materialization.metadata:
            return str(materialization.metadata[REF_METADATA].value)
    return None
