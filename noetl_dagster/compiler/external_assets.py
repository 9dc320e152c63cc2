"""Values of assets that no playbook makes: ordinary Python assets of the same Dagster instance."""

from __future__ import annotations

import asyncio
from typing import Any

from dagster import AssetKey, AssetMaterialization, AssetRecordsFilter, DagsterInstance, OpExecutionContext

from noetl_dagster.compiler.partitions import PlaybookPartitions
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import AssetNotFoundError
from noetl_dagster.events.envelopes import OK, to_result
from noetl_dagster.playbook.assets import Key, key_text
from noetl_dagster.result_ref import REF_METADATA, STORED_METADATA, ResultRef
from noetl_dagster.storage.codec import admitted
from noetl_dagster.tools.base import RunServices

DATA_VERSION = "dagster/data_version"
"""Tag of an event: the version of its data. That of a step's asset is the id of the event that ended the step."""


def services_of(runtime: Runtime, instance: DagsterInstance, context: OpExecutionContext | None = None) -> RunServices:
    """Returns what steps use of a Dagster instance: its other assets, and the partitions of playbooks.

    Args:
        context: of the op that drives the steps, if a run does.
    """
    return RunServices(
        find_asset=ExternalAssets(runtime, instance, context).find,
        choose_partition=lambda playbook, workload: PlaybookPartitions(playbook).choose(workload),
    )


class ExternalAssets:
    """Finds the latest value of an asset in Dagster's records.

    A value that one of our IO managers stored is read from there. Any other is loaded by the asset's own IO manager and
    stored once more, for the execution that reads it.
    """

    def __init__(self, runtime: Runtime, instance: DagsterInstance, context: OpExecutionContext | None = None) -> None:
        self._runtime = runtime
        self._instance = instance
        self._context = context

    async def find(self, key: Key, partition: str | None) -> dict[str, Any] | None:
        """Returns the value as the log stores a result; None if the asset was never materialized.

        Raises:
            AssetNotFoundError: it was materialized, and this run cannot load it.
        """
        made = await asyncio.to_thread(self._latest, key, partition)
        if made is None:
            return await asyncio.to_thread(self._observed, key)
        result = to_result({"status": OK, "ref": await self._reference(key, made)})
        return {"asset": key_text(key), "partition": made.partition, "result": result}

    def _observed(self, key: Key) -> dict[str, Any] | None:
        """Returns the latest observation of a source that no run makes: its address and its version."""
        records = self._instance.fetch_observations(AssetKey(key), limit=1).records
        seen = records[0].asset_observation if records else None
        if seen is None:
            return None
        facts = {name.removeprefix("dagster/"): value.value for name, value in seen.metadata.items()}
        data = {"version": seen.tags.get(DATA_VERSION), **facts}
        return {"asset": key_text(key), "partition": None, "result": to_result({"status": OK, "data": data})}

    def _latest(self, key: Key, partition: str | None) -> AssetMaterialization | None:
        partitions = None if partition is None else [partition]
        wanted = AssetRecordsFilter(AssetKey(key), asset_partitions=partitions)
        records = self._instance.fetch_materializations(wanted, limit=1).records
        return records[0].asset_materialization if records else None

    async def _reference(self, key: Key, made: AssetMaterialization) -> ResultRef:
        results = self._runtime.results
        if REF_METADATA in made.metadata:
            return await results.find(str(made.metadata[REF_METADATA].value))
        if STORED_METADATA in made.metadata:
            return ResultRef.model_validate(made.metadata[STORED_METADATA].value)
        value = await asyncio.to_thread(self._load, key, made.partition)
        return await results.put(admitted(value, key_text(key)), execution_id=0, step=key_text(key), name="asset")

    def _load(self, key: Key, partition: str | None) -> Any:
        try:
            repository = None if self._context is None else self._context.repository_def
        except Exception:  # a run outside of a code location has none
            repository = None
        if repository is None or AssetKey(key) not in repository.assets_defs_by_key:
            raise AssetNotFoundError(
                f"asset {key_text(key)} is kept by an IO manager that this run does not know; start the run in "
                "Dagster, or give the asset one of MinioIOManager, PvcIOManager, GcsIOManager, NoetlResultIOManager"
            )
        try:
            return repository.load_asset_value(AssetKey(key), instance=self._instance, partition_key=partition)
        except Exception as error:  # IO managers may raise anything
            raise AssetNotFoundError(
                f"asset {key_text(key)} cannot be loaded by its IO manager: {type(error).__name__}: {error}"
            ) from error
