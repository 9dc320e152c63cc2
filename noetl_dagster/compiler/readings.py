"""The assets that a playbook's steps read, as inputs of its graph: lineage beyond the playbook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster import (
    AllPartitionMapping,
    AssetKey,
    LastPartitionMapping,
    PartitionMapping,
    SpecificPartitionsPartitionMapping,
)

from noetl_dagster.playbook.assets import Key, PartitionsSpec, ReadPartition, SourceSpec
from noetl_dagster.playbook.models import Playbook


@dataclass(frozen=True, slots=True)
class AssetReading:
    """One asset that steps of a playbook read.

    Attributes:
        input: name of the graph's input.
        steps: the steps that read it.
        partition: the partition that all of them read.
        derivable: Dagster can derive by itself which of the asset's partitions one of the playbook's reads.
    """

    key: AssetKey
    input: str
    steps: tuple[str, ...]
    partition: str
    derivable: bool = True

    @property
    def mapping(self) -> PartitionMapping | None:
        """Dagster's mapping from the playbook's partitions to those of the asset; None for its default."""
        match self.partition:
            case ReadPartition.SAME:
                return None if self.derivable else AllPartitionMapping()
            case ReadPartition.LATEST:
                return LastPartitionMapping()
            case ReadPartition.ALL:
                return AllPartitionMapping()
        return SpecificPartitionsPartitionMapping([self.partition])


PartitionsByAsset = Mapping[Key, Sequence[PartitionsSpec]]
"""The dimensions of the partitions of assets that other playbooks make."""


def readings_of(playbook: Playbook, steps: Sequence[str], made: PartitionsByAsset) -> list[AssetReading]:
    """Returns the assets outside of the playbook that the given steps read, one entry for each asset.

    A step that reads an older result of its own playbook adds nothing, since Dagster allows no cycles.
    """
    own = {playbook.asset_key(step.name) for step in playbook.steps if step.is_asset}
    found: dict[Key, list[tuple[str, SourceSpec]]] = {}
    for name in steps:
        for source in playbook.step(name).sources.values():
            key = playbook.key_of(source.asset)
            if key not in own:
                found.setdefault(key, []).append((name, source))
    readings = []
    for number, (key, entries) in enumerate(found.items()):
        partitions = {source.partition for _, source in entries}
        partition = partitions.pop() if len(partitions) == 1 else ReadPartition.ALL.value
        readers = tuple(dict.fromkeys(name for name, _ in entries))
        derivable = _correspond(playbook.dagster.partitions, made.get(key, ()))
        readings.append(AssetReading(AssetKey(key), f"reads_{number}", readers, str(partition), derivable))
    return readings


def _correspond(own: Sequence[PartitionsSpec], others: Sequence[PartitionsSpec]) -> bool:
    """Reports whether Dagster finds the partition of one in those of the other by itself."""
    if not own or not others:
        return True
    if len(own) == len(others):
        return all(_dimensions_correspond(mine, other) for mine, other in zip(own, others, strict=True))
    (single,), several = (own, others) if len(own) == 1 else (others, own)
    same = (single.model_copy(update={"name": one.name, "workload": one.workload}) == one for one in several)
    return sum(same) == 1


def _dimensions_correspond(own: PartitionsSpec, other: PartitionsSpec) -> bool:
    if own.kind.is_time and other.kind.is_time:
        return own.name == other.name and own.timezone == other.timezone
    return own.model_copy(update={"workload": None}) == other.model_copy(update={"workload": None})
