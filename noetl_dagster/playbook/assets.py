"""Models of a playbook's Dagster settings: groups, schedules, partitions, assets, checks and sources.

The words are Dagster's own (``dagster``, ``asset``, ``checks``, ``from``); nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from noetl_dagster.playbook.fields import Model, Seconds, Spelled, StoredPlace

Key = tuple[str, ...]
"""Parts of an asset's key: ``warehouse/patients`` has two."""


class PartitionKind(StrEnum):
    """The kind of a dimension of partitions."""

    HOURLY = "hourly"
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"
    STATIC = "static"
    DYNAMIC = "dynamic"

    @property
    def is_time(self) -> bool:
        """Reports whether the partitions are windows of time."""
        return self not in (PartitionKind.STATIC, PartitionKind.DYNAMIC)


class ScheduleStatus(StrEnum):
    """The state in which a schedule is created."""

    RUNNING = "running"
    STOPPED = "stopped"


_SWITCHED = {"true": ScheduleStatus.RUNNING, "false": ScheduleStatus.STOPPED}
"""What YAML makes of on and off."""


class AutomationKind(StrEnum):
    """The condition under which Dagster materializes a playbook's assets by itself."""

    EAGER = "eager"
    ON_CRON = "on_cron"
    ON_MISSING = "on_missing"


class CheckKind(StrEnum):
    """The condition that a check tests: a template, or a built-in test of the rows."""

    WHEN = "when"
    UNIQUE = "unique"
    NOT_NULL = "not_null"
    ACCEPTED = "accepted"
    BETWEEN = "between"
    ROW_COUNT = "row_count"
    FRESH = "fresh"


class Severity(StrEnum):
    """The severity of a failed check."""

    WARN = "warn"
    ERROR = "error"


class ReadPartition(StrEnum):
    """The partition of an asset that a step reads; any other word is the key of one."""

    SAME = "same"
    LATEST = "latest"
    ALL = "all"


class PartitionsSpec(Model):
    """One dimension of a playbook's partitions."""

    name: str = Field(description="the dimension's name; of the only one: 'partition'")
    kind: PartitionKind
    workload: str | None = Field(None, description="workload key that the partition's key goes to")
    start: str | None = Field(None, description="first moment, as '2026-01-01' or '2026-01-01T06:00'")
    end: str | None = Field(None, description="where the partitions end; None: now")
    timezone: str = "UTC"
    keys: tuple[str, ...] = Field((), description="of a static dimension")
    dynamic: str | None = Field(None, description="name of the set of keys of a dynamic dimension")


class ScheduleSpec(Model):
    """One entry of ``dagster.schedules``."""

    name: str
    cron: str
    timezone: str = "UTC"
    workload: dict[str, Any] = Field(default_factory=dict)
    status: Annotated[ScheduleStatus, Spelled(words=_SWITCHED)] = ScheduleStatus.STOPPED


class AutomationSpec(Model):
    """``dagster.automation``."""

    kind: AutomationKind
    cron: str | None = None
    timezone: str = "UTC"


class FreshnessSpec(Model):
    """The greatest age of the newest result. Dagster counts minutes."""

    fail_after: Seconds = Field(ge=60, description="seconds, or text such as 50h")
    warn_after: Seconds | None = Field(None, ge=60, description="seconds, or text such as 26h")


class ObservationSpec(Model):
    """A source outside that is looked at again and again: objects of a bucket or folder, or a table."""

    asset: Key
    object: str | None = Field(None, description="s3://bucket/pattern, gs://bucket/pattern or a path")
    table: str | None = None
    auth: Any = None
    every: Seconds = Field(600.0, gt=0)


class DagsterSpec(Model):
    """The root's ``dagster`` block."""

    group: str | None = None
    owners: tuple[str, ...] = ()
    tags: dict[str, str] = Field(default_factory=dict)
    pools: dict[str, Annotated[int, Field(ge=1, strict=True)]] = Field(
        default_factory=dict, description="slots of concurrency pools"
    )
    schedules: tuple[ScheduleSpec, ...] = ()
    partitions: tuple[PartitionsSpec, ...] = Field((), description="none, one or two dimensions")
    automation: AutomationSpec | None = None
    freshness: FreshnessSpec | None = None
    observe: tuple[ObservationSpec, ...] = ()


class AssetSpec(Model):
    """A step's ``asset`` block."""

    key: Key | None = Field(None, description="None: the playbook's path and the step's name")
    description: str | None = None
    group: str | None = None
    owners: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    tags: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    code_version: str | None = None


class CheckSpec(Model):
    """One entry of a step's ``checks``.

    Attributes:
        asks: what the kind needs: a template (``when``), columns (``unique``, ``not_null``), allowed values by
            column (``accepted``), a lowest and highest value by column (``between``, None is open), a lowest
            and highest number (``row_count``), or seconds by column (``fresh``).
    """

    name: str
    kind: CheckKind
    asks: Any
    severity: Severity = Severity.ERROR
    blocking: bool = False
    description: str | None = None

    @field_validator("asks")
    @classmethod
    def _columns_are_a_tuple(cls, asks: Any, info: ValidationInfo) -> Any:
        """Stored models have a list."""
        return tuple(asks) if info.data.get("kind") in (CheckKind.UNIQUE, CheckKind.NOT_NULL) else asks


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The verdict of a check: ``why`` it did not pass, in words, and numbers and examples for people."""

    passed: bool
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class SourceSpec(Model):
    """One entry of a step's ``from``: an asset that the step reads, under a name of its own."""

    asset: Key
    partition: str = Field(ReadPartition.SAME, description="same (else latest), latest, all, or a key")
    place: StoredPlace = None


def call_name(key: str, partition: str = ReadPartition.SAME) -> str:
    """Returns the name under which a step reads ``asset("warehouse/patients")`` of its templates."""
    return f"asset:{key.strip('/')}@{partition}"


def key_text(key: Key) -> str:
    """Formats a key as ``warehouse/patients``."""
    return "/".join(key)


class PartitionKey(Model):
    """The key of one dimension; of a time dimension with its window, ISO 8601 with an offset."""

    key: str
    start: str | None = None
    end: str | None = None


class Partition(Model):
    """The partition that an execution belongs to, with the keys of its dimensions by their names.

    Its own key is as Dagster writes it: those of two dimensions joined by ``|``, in the order of their names.
    """

    key: str
    parts: dict[str, PartitionKey]

    def names(self) -> dict[str, Any]:
        """Returns the value of ``partition`` in templates: key, start and end, also for each of two dimensions."""
        window = next((one for one in self.parts.values() if one.start is not None), None)
        names: dict[str, Any] = {"key": self.key}
        if window is not None:
            names |= {"start": window.start, "end": window.end}
        if len(self.parts) > 1:
            names |= {name: part.model_dump(exclude_none=True) for name, part in self.parts.items()}
        return names

    def workload(self, dimensions: Iterable[PartitionsSpec]) -> dict[str, str]:
        """Returns the workload keys that receive the partition's keys."""
        return {one.workload: self.parts[one.name].key for one in dimensions if one.workload is not None}
