"""Assets of playbooks under other keys, groups, tags: what a project says instead of the playbook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dagster import AssetSpec, DagsterInvalidDefinitionError

from noetl_dagster.compiler.specs import asset_spec
from noetl_dagster.playbook.assets import key_text
from noetl_dagster.playbook.models import Playbook, Step


@dataclass(frozen=True, slots=True)
class PlaybookStep:
    """A step whose result is an asset, as a translation sees it."""

    playbook: Playbook
    step: Step

    @property
    def kinds(self) -> list[str]:
        """The kinds of its tools."""
        return sorted({task.kind for task in self.step.tasks})


Translation = Callable[[AssetSpec, PlaybookStep], AssetSpec]
"""Gives what Dagster is to show of an asset, from what its playbook says and the step that makes it."""

Specs = Mapping[str, AssetSpec]
"""By step."""


def translated(
    playbooks: Iterable[Playbook], translation: Translation
) -> tuple[list[Playbook], dict[str, Specs], dict[str, str]]:
    """Translates the assets of playbooks.

    Returns:
        The playbooks with the new keys of their own assets and of those that they read; the descriptions of their
        assets, by file; and the errors of playbooks that could not be translated, by file.
    """
    specs: dict[str, Specs] = {}
    own: dict[str, dict[str, str]] = {}
    failed: dict[str, str] = {}
    kept = []
    for playbook in playbooks:
        try:
            specs[playbook.file] = {
                step.name: _translated(PlaybookStep(playbook, step), translation)
                for step in playbook.steps
                if step.is_asset
            }
        except DagsterInvalidDefinitionError as error:
            failed[playbook.file] = str(error)
            continue
        kept.append(playbook)
        keys = {
            key_text(playbook.asset_key(step)): key_text(tuple(spec.key.path))
            for step, spec in specs[playbook.file].items()
        }
        own[playbook.file] = {before: after for before, after in keys.items() if before != after}
    everybodys: dict[str, str] = {}
    for renamed in own.values():
        everybodys = renamed | everybodys  # of two with one key the first is the one that others mean
    return [_renamed(one, everybodys | own[one.file]) for one in kept], specs, failed


def _translated(step: PlaybookStep, translation: Translation) -> AssetSpec:
    before = asset_spec(step.playbook, step.step)
    try:
        after = translation(before, step)
    except Exception as error:  # any exception of a user's function or template
        raise DagsterInvalidDefinitionError(
            f"step {step.step.name}: its translation fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(after, AssetSpec):
        raise DagsterInvalidDefinitionError(
            f"step {step.step.name}: its translation gives a {type(after).__name__}, not an AssetSpec"
        )
    if not any(after.key.path):
        raise DagsterInvalidDefinitionError(f"step {step.step.name}: its translation gives it an empty key")
    for name in ("partitions_def", "deps", "skippable"):
        if getattr(after, name) != getattr(before, name):
            raise DagsterInvalidDefinitionError(
                f"step {step.step.name}: its translation gives it another {name}, which the playbook itself says"
            )
    return after


def _renamed(playbook: Playbook, renamed: Mapping[str, str]) -> Playbook:
    """A playbook with those of the new keys that concern it."""
    named = {key_text(playbook.asset_key(step.name)) for step in playbook.steps}
    named |= {key_text(source.asset) for step in playbook.steps for source in step.sources.values()}
    own = {before: renamed[before] for before in sorted(named & renamed.keys())}
    return playbook.model_copy(update={"renamed": own}) if own else playbook
