"""Reads the root's ``dagster`` block: grouping, schedules, partitions, automation, freshness and observed sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from noetl_dagster.playbook.assets import (
    AutomationKind,
    AutomationSpec,
    DagsterSpec,
    FreshnessSpec,
    ObservationSpec,
    PartitionKind,
    PartitionsSpec,
    ScheduleSpec,
)
from noetl_dagster.playbook.dialects import words
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.wording import described
from noetl_dagster.playbook.workload import unknown_keys, wrong_types

ONLY = "partition"
"""Name of the only dimension."""

_MOST_DIMENSIONS = 2
_OBSERVED = ("s3", "gs", "file")

T = TypeVar("T")


def read_dagster(root: Block) -> DagsterSpec | None:
    """Reads the block, and ``schedule`` and ``partitions`` of the metadata, which are short for it."""
    block = root.child("dagster") or Block(root.reading, {}, "dagster", root.place)
    block.what = "dagster"
    short = root.values.get("metadata")
    metadata = Block(root.reading, short if isinstance(short, dict) else {}, "metadata", root.place)
    return block.read(
        DagsterSpec,
        group=words.group(block, "group"),
        owners=words.owners(block),
        tags=words.tags(block),
        schedules=(*_as_warnings(block, _short_schedule(metadata)), *_schedules(block, metadata)),
        partitions=tuple(_partitions(block)) or tuple(_as_warnings(block, _partitions(metadata))),
        automation=_automation(block),
        freshness=_freshness(block),
        observe=tuple(_observations(block)),
    )


def _short_schedule(metadata: Block) -> Iterator[ScheduleSpec]:
    if metadata.values.get("schedule") is not None:
        cron = _cron(metadata, "schedule")
        if cron is not None:
            yield ScheduleSpec(name="schedule", cron=cron)


def _as_warnings(block: Block, specs: Iterator[T]) -> list[T]:
    """Reads the short forms of the metadata; a value that cannot be understood is left out with a warning."""
    problems = block.document.problems
    before = len(problems)
    values = list(specs)
    mistaken = any(problem.severity == "error" for problem in problems[before:])
    for index, problem in enumerate(problems[before:], start=before):
        problems[index] = replace(problem, message=f"{problem.message} (left out)", severity="warning")
    return [] if mistaken else values


def _schedules(block: Block, metadata: Block) -> Iterator[ScheduleSpec]:
    seen = {"schedule"} if metadata.values.get("schedule") is not None else set()
    for number, entry in enumerate(block.blocks("schedules", "schedule"), start=1):
        name = words.name(entry, "name") or f"schedule_{number}"
        if name in seen:
            entry.error(f"two schedules are called {name!r}; rename one", "name")
        seen.add(name)
        entry.what = f"schedule {name!r}"
        cron = _cron(entry, "cron")
        workload = entry.mapping("workload")
        for warning in unknown_keys(block.reading.workload, workload):
            entry.warn(warning, "workload")
        for error in wrong_types(block.reading.workload, workload):
            entry.error(error, "workload")
        fields = {"name": name, "cron": cron or "", "timezone": _timezone(entry), "workload": workload}
        schedule = entry.read(ScheduleSpec, **fields)
        if schedule is not None and cron is not None:
            yield schedule


def _cron(block: Block, key: str) -> str | None:
    if block.take(key) is None:
        block.error(f"'{key}' is missing; write minute hour day month weekday, as \"0 2 * * *\"")
    return words.checked(block, key, words.cron_wrong)


def _timezone(block: Block) -> str | None:
    return words.checked(block, "timezone", words.timezone_wrong)


def _partitions(block: Block) -> Iterator[PartitionsSpec]:
    child = block.child("partitions")
    if child is None:
        return
    two = child.child("two")
    if two is None:
        dimension_spec = _dimension(child, ONLY)
        if dimension_spec is not None:
            yield dimension_spec
        return
    child.close()
    names = list(two.values)
    if len(names) != _MOST_DIMENSIONS:
        two.error(f"two takes two dimensions, found {len(names)}")
    for name in names:
        dimension = two.child(name)
        dimension_spec = None if dimension is None else _dimension(dimension, name)
        if dimension_spec is not None:
            # a dimension is called as its workload key, unless it says otherwise
            workload = dimension_spec.workload or (name if name in block.reading.workload else None)
            yield dimension_spec.model_copy(update={"workload": workload})


def _dimension(block: Block, name: str) -> PartitionsSpec | None:
    keys = block.take("static")
    dynamic = words.text(block, "dynamic")
    kind = block.choice(PartitionKind, "kind")
    other = None if dynamic is None else PartitionKind.DYNAMIC
    implied = other if keys is None else PartitionKind.STATIC
    if kind is not None and implied not in (None, kind):
        block.error(f"kind is {kind}, and '{implied}' says otherwise; keep one of them", "kind")
    kind = kind or implied
    if kind is None:
        block.error("kind is missing: hourly, daily, weekly, monthly, static: [keys] or dynamic: name")
        block.take_rest()
        return None
    fields = _time_fields(block, kind) if kind.is_time else {}
    if kind is PartitionKind.STATIC:
        fields["keys"] = _static_keys(block, keys)
    elif kind is PartitionKind.DYNAMIC:
        if dynamic is None:
            block.error("dynamic needs a name of the set of keys, as dynamic: customers", "kind")
        fields["dynamic"] = dynamic
    workload = block.text("workload")
    if workload is not None and workload not in block.reading.workload:
        message = f"the workload has no key {workload!r} for the partition; add it there, with a default"
        block.error(message, "workload")
    block.close()
    return block.build(PartitionsSpec, name=name, kind=kind, workload=workload, **fields)


def _time_fields(block: Block, kind: PartitionKind) -> dict[str, Any]:
    start, end = (words.checked(block, key, words.moment_wrong) for key in ("start", "end"))
    if start is None and "start" not in block:
        block.error(f"{kind} partitions need 'start', as \"2026-01-01\"")
    if start is not None and end is not None and end <= start:
        block.error(f"end {end} is not after start {start}", "end")
    return {"start": start, "end": end, "timezone": _timezone(block)}


def _static_keys(block: Block, value: Any) -> tuple[str, ...]:
    keys = tuple(str(one) for one in value) if isinstance(value, list) else ()
    if not keys:
        block.error(f"static must be a list of keys, found {described(value or None)}", "static")
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        block.error(f"static holds {', '.join(twice)} twice; keep one", "static")
    return keys


def _automation(block: Block) -> AutomationSpec | None:
    value = block.take("automation")
    if isinstance(value, dict):
        inner = block.child("automation")
        assert inner is not None
        cron, zone = _cron(inner, "on_cron"), _timezone(inner)
        inner.close()
        return inner.build(AutomationSpec, kind=AutomationKind.ON_CRON, cron=cron, timezone=zone)
    word = str(value).strip().lower()
    if word in (AutomationKind.EAGER, AutomationKind.ON_MISSING):
        return AutomationSpec(kind=AutomationKind(word))
    if value is not None:
        message = f'automation is {value!r}; use eager, on_missing or {{on_cron: "0 2 * * *"}}'
        block.error(message, "automation")
    return None


def _freshness(block: Block) -> FreshnessSpec | None:
    freshness = block.nested(FreshnessSpec, "freshness")
    if freshness is not None and (freshness.warn_after or 0) >= freshness.fail_after:
        block.error("freshness: warn_after must be shorter than fail_after", "freshness")
    return freshness


def _observations(block: Block) -> Iterator[ObservationSpec]:
    for entry in block.blocks("observe", "observed source"):
        key = words.asset_key(entry, "asset")
        place, table = words.text(entry, "object"), words.text(entry, "table")
        if key is None and "asset" not in entry:
            entry.error("an observed source needs 'asset', the key that it is known by")
        is_one = (place is None) != (table is None)
        if not is_one:
            entry.error("an observed source is either 'object' (a bucket's or a folder's) or 'table'")
        scheme, separator, _ = (place or "").partition("://")
        if separator and scheme not in _OBSERVED:
            schemes = ", ".join(f"{one}://" for one in _OBSERVED)
            entry.error(f"object {place!r} cannot be observed; known are {schemes} and paths", "object")
        fields = entry.fields(ObservationSpec, asset=key, object=place, table=table)
        entry.close()
        if key is not None and is_one:
            spec = entry.build(ObservationSpec, **fields)
            yield from () if spec is None else (spec,)
