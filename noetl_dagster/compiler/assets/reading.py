"""The assets that a playbook's steps read, as inputs of its graph: lineage beyond the playbook."""

from __future__ import annotations

from dataclasses import dataclass

from dagster import (
    AllPartitionMapping,
    AssetKey,
    LastPartitionMapping,
    PartitionMapping,
    SpecificPartitionsPartitionMapping,
)

from noetl_dagster.playbook.assets import ReadPartition, SourceSpec
from noetl_dagster.playbook.models import Playbook


@dataclass(frozen=True, slots=True)
class Reading:
    """One asset that steps of a playbook read.

    Attributes:
        input: name of the graph's input.
        steps: who reads it.
        partition: which partition, where all of them agree.
    """

    key: AssetKey
    input: str
    steps: tuple[str, ...]
    partition: str

    @property
    def mapping(self) -> PartitionMapping | None:
        match self.partition:
            case ReadPartition.SAME:
                return None
            case ReadPartition.LATEST:
                return LastPartitionMapping()
            case ReadPartition.ALL:
                return AllPartitionMapping()
        return SpecificPartitionsPartitionMapping([self.partition])


def readings_of(playbook: Playbook, steps: tuple[str, ...]) -> list[Reading]:
    """What the given steps read of assets outside of the playbook, one entry an asset.

    A step that reads an older result of its own playbook adds nothing: Dagster knows no circles.
    """
    own = {playbook.asset_key(step.name) for step in playbook.steps if step.is_asset}
    found: dict[tuple[str, ...], list[tuple[str, SourceSpec]]] = {}
    for name in steps:
        for source in playbook.step(name).sources.values():
            if source.asset not in own:
                found.setdefault(source.asset, []).append((name, source))
    readings = []
    for number, (key, entries) in enumerate(found.items()):
        partitions = {source.partition for _, source in entries}
        partition = partitions.pop() if len(partitions) == 1 else ReadPartition.ALL.value
        readers = tuple(dict.fromkeys(name for name, _ in entries))
        readings.append(Reading(AssetKey(key), f"reads_{number}", readers, str(partition)))
    return readings
