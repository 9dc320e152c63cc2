"""Playbooks that cannot be loaded, in Dagster's UI: an asset in the place of theirs, with a check that fails."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    AssetSpec,
    DefaultSensorStatus,
    Definitions,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    asset_check,
    sensor,
)

from noetl_dagster.compiler.names import sensor_name
from noetl_dagster.playbook.document import Document

GROUP = "broken_playbooks"
CHECK = "loads"
INTERVAL = 30


@dataclass(frozen=True, slots=True)
class BrokenPlaybook:
    """A playbook that was left out, and its problems: one on each line, with its place.

    Attributes:
        file: relative to the folder of the playbooks.
        meant: the assets that it would make, as far as its text shows.
    """

    file: Path
    why: str
    meant: tuple[AssetKey, ...] = ()

    @property
    def key(self) -> AssetKey:
        """The asset that stands for the playbook in the UI."""
        return AssetKey([GROUP, *(re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in self.file.parts)])

    @property
    def outcome(self) -> dict[str, Any]:
        """The outcome of its check."""
        return {
            "passed": False,
            "severity": AssetCheckSeverity.ERROR,
            "description": self.why,
            "metadata": {"file": str(self.file)},
        }


def meant_by(file: Path) -> tuple[AssetKey, ...]:
    """Returns the assets that a playbook would make if it could be loaded, as far as its text shows."""
    try:
        root = Document(file.read_text(encoding="utf-8-sig"), str(file)).root
    except (OSError, UnicodeDecodeError):
        return ()
    if not isinstance(root, dict):
        return ()
    metadata, steps = root.get("metadata"), root.get("workflow")
    if not isinstance(metadata, dict) or not isinstance(steps, list):
        return ()
    path = str(metadata.get("path") or metadata.get("name") or "").strip("/")
    keys = []
    for step in steps:
        asset, name = (step.get("asset"), step.get("step")) if isinstance(step, dict) else (False, None)
        if asset is False or not isinstance(name, str) or not path:
            continue
        key = asset.get("key") if isinstance(asset, dict) else None
        parts = key if isinstance(key, list) else str(key or f"{path}/{name}").split("/")
        if key_parts := [str(part) for part in parts if part]:
            keys.append(AssetKey(key_parts))
    return tuple(keys)


def definitions_of_broken(
    broken: Sequence[BrokenPlaybook], made: Collection[AssetKey] = (), among: str = ""
) -> Definitions:
    """Builds placeholder assets, their checks, and the sensor that reports the failures to Dagster.

    Readers of the missing assets find a placeholder: Dagster would refuse the whole code location otherwise.

    Args:
        made: the assets that other playbooks make.
        among: sets their names apart from those of other folders of the project.
    """
    if not broken:
        return Definitions()
    broken = [replace(one, file=Path(among) / one.file) for one in broken]
    broken = list({one.key: one for one in broken}.values())  # names that Dagster writes alike are shown once
    specs = [
        AssetSpec(one.key, group_name=GROUP, description=f"{one.file} cannot be loaded:\n\n```\n{one.why}\n```")
        for one in broken
    ]
    missed = {key: one for one in reversed(broken) for key in one.meant if key not in made}
    specs += [
        AssetSpec(key, group_name=GROUP, description=f"Made by {one.file}, which cannot be loaded")
        for key, one in missed.items()
    ]
    return Definitions(assets=specs, asset_checks=[_check(one) for one in broken], sensors=[_sensor(broken, among)])


def _check(one: BrokenPlaybook) -> AssetChecksDefinition:
    @asset_check(asset=one.key, name=CHECK, description="The playbook can be loaded.")
    def loads() -> AssetCheckResult:
        return AssetCheckResult(**one.outcome)

    return loads


def _sensor(broken: Sequence[BrokenPlaybook], among: str) -> SensorDefinition:
    now = hashlib.sha256(repr(broken).encode()).hexdigest()

    @sensor(
        name=sensor_name("noetl_playbooks", among),
        description="Shows playbooks that cannot be loaded as failing checks.",
        minimum_interval_seconds=INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_playbooks(context: SensorEvaluationContext) -> SensorResult:
        reason = f"{len(broken)} playbooks cannot be loaded"
        if context.cursor == now:
            return SensorResult(cursor=now, skip_reason=reason)
        events = [AssetCheckEvaluation(asset_key=one.key, check_name=CHECK, **one.outcome) for one in broken]
        return SensorResult(asset_events=events, cursor=now, skip_reason=reason)

    return noetl_playbooks
