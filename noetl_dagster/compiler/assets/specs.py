"""What Dagster shows of each step's asset: owners, tags, kinds, metadata, where it stands in the playbook."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckSpec,
    AutomationCondition,
    BetaWarning,
    CodeReferencesMetadataValue,
    FreshnessPolicy,
    LocalFileCodeReference,
)

from noetl_dagster.compiler.names import asset_key, dagster_name
from noetl_dagster.playbook.assets import AutomationKind, AutomationSpec, CheckSpec, FreshnessSpec
from noetl_dagster.playbook.models import Playbook, Step

# references to code are in beta: the dependency is pinned, and one warning a step tells nobody anything
warnings.filterwarnings("ignore", category=BetaWarning, module=r"noetl_dagster\.compiler\.assets\.specs")

KIND_PREFIX = "dagster/kind/"
BLOCKING = "noetl/blocking"
"""Metadata of a check that fails its step. Dagster is not told that it blocks: an arc may take the failure."""


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
        line = LocalFileCodeReference(
            file_path=str(Path(place.file).absolute()), line_number=place.line, label=f"step {step.name}"
        )
        found["dagster/code_references"] = CodeReferencesMetadataValue(code_references=[line])
    tables = {sink.table for sink in _sinks(step) if sink.table}
    if len(tables) == 1:
        found |= {"dagster/relation_identifier": tables.pop(), "dagster/storage_kind": "postgres"}
    return found


def _sinks(step: Step) -> list[Any]:
    return [task.sink for task in step.tasks if task.sink is not None]


def check_specs(playbook: Playbook, step: Step) -> list[AssetCheckSpec]:
    return [
        AssetCheckSpec(
            check.name,
            asset=asset_key(playbook, step.name),
            description=check.description or said_of(check),
            metadata={BLOCKING: check.blocking},
        )
        for check in step.checks
    ]


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
