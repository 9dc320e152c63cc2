"""Dagster's description of each step's asset: owners, tags, kinds, metadata, and its line in the playbook."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckSpec,
    AssetSpec,
    AutomationCondition,
    BetaWarning,
    CodeReferencesMetadataValue,
    FreshnessPolicy,
    LocalFileCodeReference,
    PreviewWarning,
)

from noetl_dagster.compiler.lineage.tables import tables_written
from noetl_dagster.compiler.names import asset_key, dagster_name
from noetl_dagster.compiler.partitions import partitions_of
from noetl_dagster.errors import Place
from noetl_dagster.playbook.assets import AutomationKind, AutomationSpec, CheckSpec, FreshnessSpec
from noetl_dagster.playbook.models import Playbook, Step

KIND_PREFIX = "dagster/kind/"
RELATION = "dagster/relation_identifier"
BLOCKING = "noetl/blocking"
"""Metadata of a check that fails its step. Dagster is not told that it blocks: an arc may take the failure."""


def asset_spec(playbook: Playbook, step: Step) -> AssetSpec:
    """What Dagster shows of a step's asset, without its lineage."""
    return AssetSpec(
        asset_key(playbook, step.name),
        description=step.asset.description or step.description,
        group_name=group_of(playbook, step),
        owners=list(owners_of(playbook, step)),
        tags=tags_of(playbook, step),
        metadata=metadata_of(playbook, step),
        code_version=step.asset.code_version,
        freshness_policy=freshness_of(playbook.dagster.freshness),
    )


def group_of(playbook: Playbook, step: Step) -> str:
    return step.asset.group or playbook.dagster.group or dagster_name(playbook.name)


def owners_of(playbook: Playbook, step: Step) -> tuple[str, ...]:
    """The step's own, else the playbook's."""
    return step.asset.owners or playbook.dagster.owners


def tags_of(playbook: Playbook, step: Step) -> dict[str, str]:
    kinds = step.asset.kinds or tuple(sorted({task.kind for task in step.tasks}))
    return playbook.dagster.tags | step.asset.tags | {f"{KIND_PREFIX}{kind}": "" for kind in kinds}


def metadata_of(playbook: Playbook, step: Step) -> dict[str, Any]:
    """The step's own metadata, the line of the playbook, and the table that it writes."""
    found: dict[str, Any] = dict(step.asset.metadata)
    place = step.place
    if place is not None and Path(place.file).is_file():
        found["dagster/code_references"] = _line_of(place, f"step {step.name}")
    return relation_metadata(playbook, step) | found


def _line_of(place: Place, label: str) -> CodeReferencesMetadataValue:
    path = str(Path(place.file).absolute())
    with _accepted(BetaWarning):
        line = LocalFileCodeReference(file_path=path, line_number=place.line, label=label)
        return CodeReferencesMetadataValue(code_references=[line])


def relation_metadata(
    playbook: Playbook, step: Step, workload: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The one table that a step writes, and the kind of its database.

    Args:
        workload: of an execution; default: the playbook's own.
    """
    tables = {(table.kind, table.name) for table in tables_written(playbook, step, workload)}
    if len(tables) != 1 or RELATION in step.asset.metadata:  # the playbook's own word goes first
        return {}
    [(kind, name)] = tables
    return {RELATION: name, "dagster/storage_kind": kind}


def check_specs(playbook: Playbook, step: Step) -> list[AssetCheckSpec]:
    """Checks of a partitioned asset are of its partitions."""
    partitions = partitions_of(playbook)
    with _accepted(PreviewWarning):
        return [
            AssetCheckSpec(
                check.name,
                asset=asset_key(playbook, step.name),
                description=check.description or said_of(check),
                metadata={BLOCKING: check.blocking},
                partitions_def=partitions,
            )
            for check in step.checks
        ]


@contextmanager
def _accepted(stage: type[Warning]) -> Iterator[None]:
    """Users of playbooks cannot do anything about which parts of Dagster are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stage)
        yield


def said_of(check: CheckSpec) -> str:
    """What a check asks, in the playbook's words."""
    asks = check.asks
    if isinstance(asks, tuple):
        asks = ", ".join(asks)
    return f"{check.kind}: {asks}"


def condition_of(spec: AutomationSpec | None) -> AutomationCondition[Any] | None:
    if spec is None:
        return None
    match spec.kind:
        case AutomationKind.EAGER:
            return AutomationCondition.eager()
        case AutomationKind.ON_MISSING:
            return AutomationCondition.on_missing()
    assert spec.cron is not None
    return AutomationCondition.on_cron(spec.cron, spec.timezone)


def freshness_of(spec: FreshnessSpec | None) -> FreshnessPolicy | None:
    if spec is None:
        return None
    warn = timedelta(seconds=spec.warn_after) if spec.warn_after is not None else None
    return FreshnessPolicy.time_window(fail_window=timedelta(seconds=spec.fail_after), warn_window=warn)
