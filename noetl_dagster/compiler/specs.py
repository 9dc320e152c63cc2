"""Dagster's description of a step's asset and its checks: owners, tags, kinds, metadata, the line in the playbook."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckSpec,
    AssetKey,
    AssetSpec,
    AutomationCondition,
    BetaWarning,
    CodeReferencesMetadataValue,
    FreshnessPolicy,
    LocalFileCodeReference,
    PartitionsDefinition,
    PreviewWarning,
)

from noetl_dagster.compiler.lineage.tables import tables_written
from noetl_dagster.compiler.names import dagster_name
from noetl_dagster.playbook.assets import AutomationKind, AutomationSpec
from noetl_dagster.playbook.models import Playbook, Step

KIND_PREFIX = "dagster/kind/"
RELATION = "dagster/relation_identifier"
BLOCKING = "noetl/blocking"
"""Metadata of a check that fails its step. Dagster gets no blocking check, since an arc may handle the failure."""


def asset_spec(playbook: Playbook, step: Step) -> AssetSpec:
    """Returns what Dagster shows of a step's asset, without its lineage.

    The step's own owners and group take precedence over those of the playbook.
    """
    kinds = step.asset.kinds or tuple(sorted({task.kind for task in step.tasks}))
    freshness = playbook.dagster.freshness
    return AssetSpec(
        AssetKey(playbook.asset_key(step.name)),
        description=step.asset.description or step.description,
        group_name=step.asset.group or playbook.dagster.group or dagster_name(playbook.name),
        owners=list(step.asset.owners or playbook.dagster.owners),
        tags=playbook.dagster.tags | step.asset.tags | {f"{KIND_PREFIX}{kind}": "" for kind in kinds},
        metadata=_metadata_of(playbook, step),
        code_version=step.asset.code_version,
        freshness_policy=FreshnessPolicy.time_window(
            fail_window=timedelta(seconds=freshness.fail_after),
            warn_window=timedelta(seconds=freshness.warn_after) if freshness.warn_after is not None else None,
        )
        if freshness is not None
        else None,
    )


def relation_metadata(
    playbook: Playbook, step: Step, workload: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the name and kind of the one table that a step writes; nothing for none or several.

    Args:
        workload: of an execution; default: the playbook's own.
    """
    tables = {(table.kind, table.name) for table in tables_written(playbook, step, workload)}
    if len(tables) != 1 or RELATION in step.asset.metadata:  # the playbook's own metadata takes precedence
        return {}
    [(kind, name)] = tables
    return {RELATION: name, "dagster/storage_kind": kind}


def check_specs(
    playbook: Playbook, step: Step, partitions: PartitionsDefinition | None
) -> list[AssetCheckSpec]:
    """Returns the checks of a step's asset. Checks of a partitioned asset apply to its partitions."""
    with _accepted(PreviewWarning):
        return [
            AssetCheckSpec(
                check.name,
                asset=AssetKey(playbook.asset_key(step.name)),
                # such as "unique: id, day"
                description=check.description
                or f"{check.kind}: {', '.join(check.asks) if isinstance(check.asks, tuple) else check.asks}",
                metadata={BLOCKING: check.blocking},
                partitions_def=partitions,
            )
            for check in step.checks
        ]


def condition_of(spec: AutomationSpec | None) -> AutomationCondition[Any] | None:
    """Returns Dagster's automation condition for the playbook's ``automation``."""
    if spec is None:
        return None
    match spec.kind:
        case AutomationKind.EAGER:
            return AutomationCondition.eager()
        case AutomationKind.ON_MISSING:
            return AutomationCondition.on_missing()
    assert spec.cron is not None
    return AutomationCondition.on_cron(spec.cron, spec.timezone)


def _metadata_of(playbook: Playbook, step: Step) -> dict[str, Any]:
    """Returns the step's own metadata, its line in the playbook, and the table that it writes."""
    found: dict[str, Any] = dict(step.asset.metadata)
    place = step.place
    if place is not None and Path(place.file).is_file():
        file, label = str(Path(place.file).absolute()), f"step {step.name}"
        with _accepted(BetaWarning):
            line = LocalFileCodeReference(file_path=file, line_number=place.line, label=label)
            found["dagster/code_references"] = CodeReferencesMetadataValue(code_references=[line])
    return relation_metadata(playbook, step) | found


@contextmanager
def _accepted(stage: type[Warning]) -> Iterator[None]:
    """Hides warnings about new parts of Dagster, since users of playbooks cannot do anything about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stage)
        yield
