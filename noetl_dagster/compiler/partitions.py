"""A playbook's partitions as Dagster's, and one of their keys as the partition of an execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any

from dagster import (
    DagsterInstance,
    DailyPartitionsDefinition,
    DynamicPartitionsDefinition,
    HourlyPartitionsDefinition,
    MonthlyPartitionsDefinition,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    StaticPartitionsDefinition,
    TimeWindowPartitionsDefinition,
    WeeklyPartitionsDefinition,
    partition_loading_context,
)

from noetl_dagster.errors import WorkloadError
from noetl_dagster.playbook.assets import Partition, PartitionKey, PartitionKind, PartitionsSpec
from noetl_dagster.playbook.models import Playbook

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
            raise WorkloadError(
                f"playbook {self.playbook.name} has no partitions, and {key!r} of it is wanted"
            )
        if not isinstance(self.definition, MultiPartitionsDefinition):
            [only] = self.dimensions
            return Partition(key=key, parts={only.name: self._key_of(only, key, instance)})
        try:
            keys = self.definition.get_partition_key_from_str(key).keys_by_dimension
        except Exception as error:  # Dagster raises many types for text that is no key of two dimensions
            names = "|".join(sorted(self.by_dimension))
            raise WorkloadError(
                f"partition {key!r} of {self.playbook.name} must be written as {names}"
            ) from error
        parts = {one.name: self._key_of(one, keys[one.name], instance) for one in self.dimensions}
        return Partition(key=str(MultiPartitionKey(keys)), parts=parts)

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
        return self.find(next(iter(keys.values())) if len(keys) == 1 else str(MultiPartitionKey(keys)))

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
            found = {name: _due(definition) for name, definition in self.by_dimension.items()}
        if len(found) == 1:
            return next(iter(found.values()))
        return [
            str(MultiPartitionKey(dict(zip(found, keys, strict=True)))) for keys in product(*found.values())
        ]

    def _key_of(self, spec: PartitionsSpec, key: str, instance: DagsterInstance | None) -> PartitionKey:
        definition = self.by_dimension[spec.name]
        if isinstance(definition, TimeWindowPartitionsDefinition):
            if not _has_window(definition, key):
                first, last = definition.get_first_partition_key(), definition.get_last_partition_key()
                known = f"they are from {first} to {last}" if first is not None else "none has begun yet"
                raise self._unknown(key, known)
            window = definition.time_window_for_partition_key(key)
            return PartitionKey(key=key, start=window.start.isoformat(), end=window.end.isoformat())
        keys: Sequence[str] = spec.keys
        if spec.dynamic is not None:
            keys = [key] if instance is None else instance.get_dynamic_partitions(spec.dynamic)
        if key not in keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            known = f"there are {', '.join(keys[:_SHOWN])}{more}" if keys else "there are none yet"
            raise self._unknown(key, known)
        return PartitionKey(key=key)

    def _unknown(self, key: str, known: str) -> WorkloadError:
        return WorkloadError(f"playbook {self.playbook.name} has no partition {key!r}; {known}")

    def _example(self) -> str:
        """Returns a key for messages: the last time window, the first of other keys."""
        found = {}
        for one in self.dimensions:
            definition = self.by_dimension[one.name]
            is_time = isinstance(definition, TimeWindowPartitionsDefinition)
            key = definition.get_last_partition_key() if is_time else next(iter(one.keys), None)
            found[one.name] = key or "KEY"
        return next(iter(found.values())) if len(found) == 1 else f"'{MultiPartitionKey(found)}'"


def partition_tags(partition: Partition | None) -> dict[str, str]:
    """Returns the run tags by which Dagster finds the partition of a run."""
    if partition is None:
        return {}
    tags = {PARTITION_TAG: partition.key}
    if len(partition.parts) > 1:
        tags |= {f"{PARTITION_TAG}/{name}": part.key for name, part in partition.parts.items()}
    return tags


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


def _has_window(definition: TimeWindowPartitionsDefinition, key: str) -> bool:
    try:
        return definition.has_partition_key(key)
    except ValueError:  # text that is no time
        return False


def _due(definition: PartitionsDefinition) -> list[str]:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        last = definition.get_last_partition_key()
        return [] if last is None else [last]
    return list(definition.get_partition_keys())
