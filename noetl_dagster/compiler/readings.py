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
class Reading:
    """One asset that steps of a playbook read.

    Attributes:
        input: name of the graph's input.
        steps: who reads it.
        partition: which partition, where all of them agree.
        alike: Dagster can tell which of its partitions one of the playbook's reads.
    """

    key: AssetKey
    input: str
    steps: tuple[str, ...]
    partition: str
    alike: bool = True

    @property
    def mapping(self) -> PartitionMapping | None:
        match self.partition:
            case ReadPartition.SAME:
                return None if self.alike else AllPartitionMapping()
            case ReadPartition.LATEST:
                return LastPartitionMapping()
            case ReadPartition.ALL:
                return AllPartitionMapping()
        return SpecificPartitionsPartitionMapping([self.partition])


Partitioned = Mapping[Key, Sequence[PartitionsSpec]]
"""The dimensions of the partitions of assets that other playbooks make."""


def readings_of(playbook: Playbook, steps: tuple[str, ...], made: Partitioned) -> list[Reading]:
    """What the given steps read of assets outside of the playbook, one entry an asset.

    A step that reads an older result of its own playbook adds nothing: Dagster knows no circles.
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
        alike = _are_alike(playbook.dagster.partitions, made.get(key, ()))
        readings.append(Reading(AssetKey(key), f"reads_{number}", readers, str(partition), alike))
    return readings


def _are_alike(own: Sequence[PartitionsSpec], others: Sequence[PartitionsSpec]) -> bool:
    """Whether Dagster finds the partition of one in those of the other by itself."""
    if not own or not others:
        return True
    if len(own) == len(others):
        return all(_is_alike(mine, other) for mine, other in zip(own, others, strict=True))
    (single,), several = (own, others) if len(own) == 1 else (others, own)
    return (
        sum(single.model_copy(update={"name": one.name, "workload": one.workload}) == one for one in several)
        == 1
    )


def _is_alike(own: PartitionsSpec, other: PartitionsSpec) -> bool:
    if own.kind.is_time and other.kind.is_time:
        return own.name == other.name and own.timezone == other.timezone
    return own.model_copy(update={"workload": None}) == other.model_copy(update={"workload": None})
