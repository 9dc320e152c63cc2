"""A playbook's partitions as Dagster's, and how those of the assets that it reads correspond to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any

from dagster import (
    AllPartitionMapping,
    AssetKey,
    DagsterInstance,
    DailyPartitionsDefinition,
    DynamicPartitionsDefinition,
    HourlyPartitionsDefinition,
    LastPartitionMapping,
    MonthlyPartitionsDefinition,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionMapping,
    PartitionsDefinition,
    SpecificPartitionsPartitionMapping,
    StaticPartitionsDefinition,
    TimeWindowPartitionsDefinition,
    WeeklyPartitionsDefinition,
    partition_loading_context,
)

from noetl_dagster.errors import WorkloadError
from noetl_dagster.playbook.assets import (
    Key,
    Partition,
    PartitionKey,
    PartitionKind,
    PartitionsSpec,
    ReadPartition,
    SourceSpec,
)
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.wording import listed

PARTITION_TAG = "dagster/partition"
"""Run tag: the key of the run's partition."""

_DAYS = 7
_SHOWN = 10


@dataclass(frozen=True)
class PlaybookPartitions:
    """The partitions of one playbook: none, one dimension or two."""

    playbook: Playbook

    @property
    def dimensions(self) -> tuple[PartitionsSpec, ...]:
        """The dimensions as the playbook declares them."""
        return self.playbook.dagster.partitions

    @cached_property
    def by_dimension(self) -> Mapping[str, PartitionsDefinition]:
        """Dagster's definition of each dimension, by its name."""
        return {one.name: _definition_of(one) for one in self.dimensions}

    @cached_property
    def definition(self) -> PartitionsDefinition | None:
        """Dagster's definition of all dimensions together; None for a playbook without partitions."""
        if len(self.dimensions) > 1:
            return MultiPartitionsDefinition(dict(self.by_dimension))
        return next(iter(self.by_dimension.values()), None)

    def find(self, key: str, instance: DagsterInstance | None = None) -> Partition:
        """Returns the partition with a key.

        Args:
            key: as Dagster writes it; of two dimensions ``2026-01-01|berlin``.
            instance: has the keys of dynamic dimensions; without it any key of theirs is accepted.

        Raises:
            WorkloadError: the playbook has no such partition.
        """
        if self.definition is None:
            raise WorkloadError(f"playbook {self.playbook.name} has no partitions, so it has no partition {key!r}")
        keys: Mapping[str, str] = {self.dimensions[0].name: key}
        if isinstance(self.definition, MultiPartitionsDefinition):
            try:
                keys = self.definition.get_partition_key_from_str(key).keys_by_dimension
            except Exception as error:  # Dagster raises many types for text that is no key of two dimensions
                names = "|".join(sorted(self.by_dimension))
                raise WorkloadError(f"partition {key!r} of {self.playbook.name} must be written as {names}") from error
        parts = {one.name: self._key_of(one, keys[one.name], instance) for one in self.dimensions}
        return Partition(key=_joined(keys), parts=parts)

    def choose(self, workload: Mapping[str, Any], key: str | None = None) -> Partition | None:
        """Returns the partition of an execution that is to start; None for a playbook without partitions.

        Args:
            workload: overrides; without a key, their values and the playbook's own select the partition.
            key: the requested partition.

        Raises:
            WorkloadError: there is no such partition, or none was chosen.
        """
        if key is not None:
            return self.find(key)
        if not self.dimensions:
            return None
        values = {**self.playbook.workload, **workload}
        keys: dict[str, str] = {}
        for one in self.dimensions:
            if one.workload is None or values.get(one.workload) in (None, ""):
                raise WorkloadError(
                    f"playbook {self.playbook.name} has partitions: choose one, as with --partition {self._example()}"
                )
            keys[one.name] = str(values[one.workload])
        return self.find(_joined(keys))

    def register(self, partition: Partition, instance: DagsterInstance) -> None:
        """Adds the keys of dynamic dimensions that Dagster does not have yet."""
        for one in self.dimensions:
            key = partition.parts[one.name].key
            if one.dynamic is not None and not instance.has_dynamic_partition(one.dynamic, key):
                instance.add_dynamic_partitions(one.dynamic, [key])

    def due(self, moment: datetime, instance: DagsterInstance) -> list[str]:
        """Returns the keys for one tick of a schedule.

        These are the last time window that has ended, combined with every key of the other dimension.
        """
        with partition_loading_context(effective_dt=moment, dynamic_partitions_store=instance):
            keys_by_dimension = {name: _due(definition) for name, definition in self.by_dimension.items()}
        return [
            _joined(dict(zip(keys_by_dimension, keys, strict=True))) for keys in product(*keys_by_dimension.values())
        ]

    def _key_of(self, spec: PartitionsSpec, key: str, instance: DagsterInstance | None) -> PartitionKey:
        definition = self.by_dimension[spec.name]
        if isinstance(definition, TimeWindowPartitionsDefinition):
            try:
                exists = definition.has_partition_key(key)
            except ValueError:  # text that is no time
                exists = False
            if not exists:
                first, last = definition.get_first_partition_key(), definition.get_last_partition_key()
                raise self._unknown(
                    key, f"they are from {first} to {last}" if first is not None else "none has begun yet"
                )
            window = definition.time_window_for_partition_key(key)
            return PartitionKey(key=key, start=window.start.isoformat(), end=window.end.isoformat())
        keys: Sequence[str] = spec.keys
        if spec.dynamic is not None:
            keys = [key] if instance is None else instance.get_dynamic_partitions(spec.dynamic)
        if key not in keys:
            raise self._unknown(key, f"there are {listed(tuple(keys), _SHOWN)}" if keys else "there are none yet")
        return PartitionKey(key=key)

    def _unknown(self, key: str, hint: str) -> WorkloadError:
        return WorkloadError(f"playbook {self.playbook.name} has no partition {key[:200]!r}; {hint}")

    def _example(self) -> str:
        """Returns a key for messages: the last time window, the first of other keys."""
        example = {}
        for one in self.dimensions:
            definition = self.by_dimension[one.name]
            is_time = isinstance(definition, TimeWindowPartitionsDefinition)
            key = definition.get_last_partition_key() if is_time else next(iter(one.keys), None)
            example[one.name] = key or "KEY"
        return _joined(example) if len(example) == 1 else f"'{_joined(example)}'"


def stored_partition(stored: Mapping[str, Any] | None) -> Partition | None:
    """Returns the partition that the state of an execution has, if any."""
    return None if stored is None else Partition.model_validate(stored)


def partition_tags(partition: Partition | None) -> dict[str, str]:
    """Returns the run tags by which Dagster finds the partition of a run."""
    if partition is None:
        return {}
    tags = {PARTITION_TAG: partition.key}
    if len(partition.parts) > 1:
        tags |= {f"{PARTITION_TAG}/{name}": part.key for name, part in partition.parts.items()}
    return tags


def _joined(keys: Mapping[str, str]) -> str:
    """Returns the key of a partition from its keys by dimension."""
    return next(iter(keys.values())) if len(keys) == 1 else str(MultiPartitionKey(keys))


def _definition_of(spec: PartitionsSpec) -> PartitionsDefinition:
    """Returns Dagster's definition of one dimension.

    Time windows begin as the start does: at its time of day, on its day of the week or of the month.
    """
    match spec.kind:
        case PartitionKind.STATIC:
            return StaticPartitionsDefinition(list(spec.keys))
        case PartitionKind.DYNAMIC:
            return DynamicPartitionsDefinition(name=spec.dynamic)
    assert spec.start is not None
    start = datetime.fromisoformat(spec.start)
    end = datetime.fromisoformat(spec.end) if spec.end is not None else None
    minute, hour, zone = start.minute, start.hour, spec.timezone
    match spec.kind:
        case PartitionKind.HOURLY:
            return HourlyPartitionsDefinition(start, end, minute_offset=minute, timezone=zone)
        case PartitionKind.WEEKLY:
            day = start.isoweekday() % _DAYS
            return WeeklyPartitionsDefinition(start, end, minute, hour, day, zone)
        case PartitionKind.MONTHLY:
            return MonthlyPartitionsDefinition(start, end, minute, hour, start.day, zone)
    return DailyPartitionsDefinition(start, end, minute, hour, zone)


def _due(definition: PartitionsDefinition) -> list[str]:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        last = definition.get_last_partition_key()
        return [] if last is None else [last]
    return list(definition.get_partition_keys())


@dataclass(frozen=True, slots=True)
class AssetReading:
    """One asset that steps of a playbook read: lineage beyond the playbook.

    Attributes:
        input: name of the graph's input.
        steps: the steps that read it.
        mapping: from the playbook's partitions to those of the asset; None for Dagster's default.
    """

    key: AssetKey
    input: str
    steps: tuple[str, ...]
    mapping: PartitionMapping | None


PartitionsByAsset = Mapping[Key, Sequence[PartitionsSpec]]
"""The dimensions of the partitions of assets that other playbooks make."""


def readings_of(playbook: Playbook, steps: Sequence[str], made: PartitionsByAsset) -> list[AssetReading]:
    """Returns the assets outside of the playbook that the given steps read, one entry for each asset.

    A step that reads an older result of its own playbook adds nothing, since Dagster allows no cycles.
    """
    own = {playbook.asset_key(step.name) for step in playbook.steps if step.is_asset}
    sources_by_asset: dict[Key, list[tuple[str, SourceSpec]]] = {}
    for name in steps:
        for source in playbook.step(name).sources.values():
            key = playbook.key_of(source.asset)
            if key not in own:
                sources_by_asset.setdefault(key, []).append((name, source))
    readings = []
    for number, (key, entries) in enumerate(sources_by_asset.items()):
        partitions = {source.partition for _, source in entries}
        partition = partitions.pop() if len(partitions) == 1 else ReadPartition.ALL
        readers = tuple(dict.fromkeys(name for name, _ in entries))
        mapping = _mapping(partition, playbook.dagster.partitions, made.get(key, ()))
        readings.append(AssetReading(AssetKey(key), f"reads_{number}", readers, mapping))
    return readings


def _mapping(
    partition: str, own: Sequence[PartitionsSpec], others: Sequence[PartitionsSpec]
) -> PartitionMapping | None:
    match partition:
        case ReadPartition.SAME if _correspond(own, others):
            return None
        case ReadPartition.LATEST:
            return LastPartitionMapping()
        case ReadPartition.SAME | ReadPartition.ALL:
            return AllPartitionMapping()
    return SpecificPartitionsPartitionMapping([str(partition)])


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
