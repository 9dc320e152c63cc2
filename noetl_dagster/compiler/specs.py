"""Descriptions for Dagster of the assets and checks of steps, and for ``dagster-k8s`` of the pods of runs and steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
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
from noetl_dagster.compiler.names import POD_TAG, dagster_name
from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind
from noetl_dagster.playbook.assets import AutomationKind, AutomationSpec
from noetl_dagster.playbook.models import Playbook, Step
from noetl_dagster.playbook.permissions import refusal, refused, spec_of_pod
from noetl_dagster.playbook.pods import Pod
from noetl_dagster.playbook.tool_kinds import TOOL_KINDS
from noetl_dagster.settings import get_settings

KIND_PREFIX = "dagster/kind/"
RELATION = "dagster/relation_identifier"
BLOCKING = "noetl/blocking"
"""Metadata of a check that fails its step. Dagster gets no blocking check, since an arc may handle the failure."""


def asset_spec(playbook: Playbook, step: Step) -> AssetSpec:
    """Returns what Dagster shows of a step's asset, without its lineage.

    The step's own owners and group take precedence over those of the playbook.
    """
    kinds = step.asset.kinds or tuple(sorted({task.kind for task in step.tasks} & TOOL_KINDS.keys()))
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


def relation_metadata(playbook: Playbook, step: Step, workload: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the name and kind of the one table that a step writes; nothing for none or several.

    Args:
        workload: of an execution; default: the playbook's own.
    """
    tables = {(table.kind, table.name) for table in tables_written(playbook, step, workload)}
    if len(tables) != 1 or RELATION in step.asset.metadata:  # the playbook's own metadata takes precedence
        return {}
    [(kind, name)] = tables
    return {RELATION: name, "dagster/storage_kind": kind}


def check_specs(playbook: Playbook, step: Step, partitions: PartitionsDefinition | None) -> list[AssetCheckSpec]:
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
    metadata: dict[str, Any] = dict(step.asset.metadata)
    place = step.place
    if place is not None and Path(place.file).is_file():
        file, label = str(Path(place.file).absolute()), f"step {step.name}"
        with _accepted(BetaWarning):
            line = LocalFileCodeReference(file_path=file, line_number=place.line, label=label)
            metadata["dagster/code_references"] = CodeReferencesMetadataValue(code_references=[line])
    return relation_metadata(playbook, step) | metadata


@contextmanager
def _accepted(stage: type[Warning]) -> Iterator[None]:
    """Hides warnings about new parts of Dagster, since users of playbooks cannot do anything about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stage)
        yield


def run_tags(playbook: Playbook) -> dict[str, str]:
    """Returns the tags of a playbook's runs; none if it does not configure their pods."""
    if playbook.pod is None:
        return {}
    return {POD_TAG: _allowed(playbook.pod, Place(playbook.file, 1), "executor")}


def op_tags(playbook: Playbook, steps: Iterable[str]) -> dict[str, str]:
    """Returns the tags of the op of some steps; none if none of them asks for a pod.

    Steps that share an op share its pod: the checks refuse a playbook in which two of them ask for others.
    """
    for name in steps:
        step = playbook.step(name)
        if step.spec.pod is not None:
            place = step.place or Place(playbook.file, 1)
            return {POD_TAG: _allowed(step.spec.pod, place, f"step {name!r}")}
    return {}


def config_of(pod: Pod) -> dict[str, Any]:
    """Returns a pod as ``dagster-k8s`` reads it: parts of a container, of a pod's spec and of its metadata."""
    amounts = {"cpu": pod.cpu, "memory": pod.memory, "ephemeral-storage": pod.ephemeral_storage}
    devices = {name: str(number) for name, number in pod.gpu.items()}
    # the run launcher would fill in one that is missing, and it may contradict the other
    requests = {name: one.request or one.limit for name, one in amounts.items() if one is not None}
    limits = {name: one.limit or one.request for name, one in amounts.items() if one is not None}
    sources = [{"secret_ref": {"name": name}} for name in pod.env_secrets]
    sources += [{"config_map_ref": {"name": name}} for name in pod.env_config_maps]
    container = {
        "image": pod.image,
        "image_pull_policy": pod.image_pull_policy,
        "resources": _without_empty({"requests": {**requests, **devices}, "limits": {**limits, **devices}}),
        "env": [{"name": name, "value": value} for name, value in pod.env.items()],
        "env_from": sources,
    }
    spec = {
        "node_selector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "service_account_name": pod.service_account,
        "priority_class_name": pod.priority_class,
    }
    metadata = {"labels": pod.labels, "annotations": pod.annotations}
    parts = {
        "container_config": _without_empty(container),
        "pod_spec_config": _without_empty(spec),
        "pod_template_spec_metadata": _without_empty(metadata),
    }
    return _without_empty(parts)


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _allowed(pod: Pod, place: Place, what: str) -> str:
    """Returns the tag's text.

    Raises:
        PlaybookError: the installation does not allow the rights of the pod.
    """
    if rights := refused(spec_of_pod(pod), get_settings().container_allow, pod.annotations):
        message = f"{what}: {refusal(rights)}"
        raise PlaybookError([Problem(place, message, kind=ProblemKind.RIGHT_NOT_ALLOWED)])
    return orjson.dumps(config_of(pod), option=orjson.OPT_SORT_KEYS).decode()
