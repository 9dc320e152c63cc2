"""A playbook's partitions and schedules as Dagster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any

from dagster import (
    DagsterInstance,
    DailyPartitionsDefinition,
    DefaultScheduleStatus,
    DynamicPartitionsDefinition,
    HourlyPartitionsDefinition,
    MonthlyPartitionsDefinition,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    StaticPartitionsDefinition,
    TimeWindowPartitionsDefinition,
    WeeklyPartitionsDefinition,
    partition_loading_context,
)

from noetl_dagster.compiler.names import dagster_name
from noetl_dagster.errors import WorkloadError
from noetl_dagster.playbook.assets import (
    Partition,
    PartitionKey,
    PartitionKind,
    PartitionsSpec,
    ScheduleSpec,
    ScheduleStatus,
)
from noetl_dagster.playbook.models import Playbook

PARTITION_TAG = "dagster/partition"
"""Run tag: the key of the partition that a run is of."""

_DAYS = 7
_SHOWN = 10


def partitions_of(playbook: Playbook) -> PartitionsDefinition | None:
    """Dagster's definition of a playbook's partitions; None where it has none."""
    dimensions = playbook.dagster.partitions
    if not dimensions:
        return None
    if len(dimensions) == 1:
        return definition_of(dimensions[0])
    return MultiPartitionsDefinition({one.name: definition_of(one) for one in dimensions})


def definition_of(spec: PartitionsSpec) -> PartitionsDefinition:
    """Dagster's definition of one dimension."""
    match spec.kind:
        case PartitionKind.STATIC:
            return StaticPartitionsDefinition(list(spec.keys))
        case PartitionKind.DYNAMIC:
            return DynamicPartitionsDefinition(name=spec.dynamic)
    return _time(spec)


def _time(spec: PartitionsSpec) -> TimeWindowPartitionsDefinition:
    """Windows begin as the start does: at its time of day, on its day of the week or of the month."""
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


def partition_of(playbook: Playbook, key: str, instance: DagsterInstance | None = None) -> Partition:
    """The partition with a key.

    Args:
        key: as Dagster writes it; of two dimensions ``2026-01-01|berlin``.
        instance: knows the keys of dynamic dimensions; without it any is taken.

    Raises:
        WorkloadError: the playbook has no such partition.
    """
    definition = partitions_of(playbook)
    if definition is None:
        raise WorkloadError(f"playbook {playbook.name} has no partitions, and {key!r} of it is wanted")
    dimensions = playbook.dagster.partitions
    if not isinstance(definition, MultiPartitionsDefinition):
        return Partition(key=key, parts={dimensions[0].name: _part(playbook, dimensions[0], key, instance)})
    try:
        keys = definition.get_partition_key_from_str(key).keys_by_dimension
    except Exception as error:  # whatever Dagster makes of text that is no key of two dimensions
        names = "|".join(sorted(one.name for one in dimensions))
        raise WorkloadError(f"partition {key!r} of {playbook.name} must be written as {names}") from error
    parts = {one.name: _part(playbook, one, keys[one.name], instance) for one in dimensions}
    return Partition(key=str(MultiPartitionKey(keys)), parts=parts)


def partition_tags(partition: Partition | None) -> dict[str, str]:
    """Run tags by which Dagster knows the partition of a run."""
    if partition is None:
        return {}
    tags = {PARTITION_TAG: partition.key}
    if len(partition.parts) > 1:
        tags |= {f"{PARTITION_TAG}/{name}": part.key for name, part in partition.parts.items()}
    return tags


def _part(
    playbook: Playbook, spec: PartitionsSpec, key: str, instance: DagsterInstance | None
) -> PartitionKey:
    definition = definition_of(spec)
    if isinstance(definition, TimeWindowPartitionsDefinition):
        if not _is_time(definition, key):
            first, last = definition.get_first_partition_key(), definition.get_last_partition_key()
            known = f"they are from {first} to {last}" if first is not None else "none has begun yet"
            raise _unknown(playbook, key, known)
        window = definition.time_window_for_partition_key(key)
        return PartitionKey(key=key, start=window.start.isoformat(), end=window.end.isoformat())
    keys: Sequence[str] = spec.keys
    if spec.dynamic is not None:
        keys = [key] if instance is None else instance.get_dynamic_partitions(spec.dynamic)
    if key not in keys:
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        known = f"there are {', '.join(keys[:_SHOWN])}{more}" if keys else "there are none yet"
        raise _unknown(playbook, key, known)
    return PartitionKey(key=key)


def _is_time(definition: TimeWindowPartitionsDefinition, key: str) -> bool:
    try:
        return definition.has_partition_key(key)
    except ValueError:  # text that is no time
        return False


def _unknown(playbook: Playbook, key: str, known: str) -> WorkloadError:
    return WorkloadError(f"playbook {playbook.name} has no partition {key!r}; {known}")


def chosen_partition(
    playbook: Playbook, workload: Mapping[str, Any], key: str | None = None
) -> Partition | None:
    """The partition of an execution that is to start; None for a playbook without partitions.

    Args:
        workload: overrides; their values and the playbook's own name the partition where nobody says which.
        key: what was asked for.

    Raises:
        WorkloadError: there is no such partition, or none was chosen.
    """
    if key is not None:
        return partition_of(playbook, key)
    if not playbook.dagster.partitions:
        return None
    values = {**playbook.workload, **workload}
    keys: dict[str, str] = {}
    for one in playbook.dagster.partitions:
        if one.workload is None or values.get(one.workload) in (None, ""):
            raise WorkloadError(
                f"playbook {playbook.name} has partitions: choose one, as with --partition {_example(playbook)}"
            )
        keys[one.name] = str(values[one.workload])
    key = next(iter(keys.values())) if len(keys) == 1 else str(MultiPartitionKey(keys))
    return partition_of(playbook, key)


def register(partition: Partition, playbook: Playbook, instance: DagsterInstance) -> None:
    """Tells Dagster of keys of dynamic dimensions that it does not know yet."""
    for one in playbook.dagster.partitions:
        key = partition.parts[one.name].key
        if one.dynamic is not None and not instance.has_dynamic_partition(one.dynamic, key):
            instance.add_dynamic_partitions(one.dynamic, [key])


def _example(playbook: Playbook) -> str:
    """A key, for messages: the last of time, the first of what is no time."""
    found = {}
    for one in playbook.dagster.partitions:
        definition = definition_of(one)
        time = isinstance(definition, TimeWindowPartitionsDefinition)
        found[one.name] = (
            definition.get_last_partition_key() if time else next(iter(one.keys), None)
        ) or "KEY"
    return next(iter(found.values())) if len(found) == 1 else f"'{MultiPartitionKey(found)}'"


def schedules_of(
    playbook: Playbook, job: Any, run_config: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[ScheduleDefinition]:
    """The schedules of a playbook's job.

    Args:
        run_config: gives the run config of a workload.
    """
    return [_schedule(playbook, spec, job, run_config(spec.workload)) for spec in playbook.dagster.schedules]


def _schedule(playbook: Playbook, spec: ScheduleSpec, job: Any, config: dict[str, Any]) -> ScheduleDefinition:
    def requests(context: ScheduleEvaluationContext) -> Iterator[RunRequest | SkipReason]:
        moment = context.scheduled_execution_time
        dimensions = playbook.dagster.partitions
        if not dimensions:
            yield RunRequest(run_key=moment.isoformat(), run_config=config)
            return
        keys = due(dimensions, moment, context.instance)
        if not keys:
            yield SkipReason("no partition is due")
        for key in keys:
            yield RunRequest(run_key=f"{key} {moment.isoformat()}", run_config=config, partition_key=key)

    running = spec.status is ScheduleStatus.RUNNING
    return ScheduleDefinition(
        name=f"{dagster_name(playbook.name)}_{spec.name}",
        job=job,
        cron_schedule=spec.cron,
        execution_timezone=spec.timezone,
        execution_fn=requests,
        default_status=DefaultScheduleStatus.RUNNING if running else DefaultScheduleStatus.STOPPED,
        description=f"{playbook.metadata.path}: {spec.name}",
    )


def due(dimensions: Sequence[PartitionsSpec], moment: datetime, instance: DagsterInstance) -> list[str]:
    """Keys that a tick is for: the last window that has ended, and every key of what is no time."""
    with partition_loading_context(effective_dt=moment, dynamic_partitions_store=instance):
        found = {one.name: _due(definition_of(one)) for one in dimensions}
    if len(found) == 1:
        return next(iter(found.values()))
    return [str(MultiPartitionKey(dict(zip(found, keys, strict=True)))) for keys in product(*found.values())]


def _due(definition: PartitionsDefinition) -> list[str]:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        last = definition.get_last_partition_key()
        return [] if last is None else [last]
    return list(definition.get_partition_keys())
