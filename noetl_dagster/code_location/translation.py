"""Assets of playbooks under other keys, groups, tags: what a project says instead of the playbook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dagster import AssetSpec, DagsterInvalidDefinitionError

from noetl_dagster.compiler.assets.specs import asset_spec
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
) -> tuple[list[Playbook], dict[str, Specs]]:
    """Playbooks that know the new keys, their own and those that they read, and what to show of each by its file.

    Raises:
        DagsterInvalidDefinitionError: a translation asks for what only a playbook can say.
    """
    playbooks = list(playbooks)
    renamed: dict[str, str] = {}
    specs: dict[str, Specs] = {}
    for playbook in playbooks:
        own = specs[playbook.file] = {
            step.name: _translated(PlaybookStep(playbook, step), translation)
            for step in playbook.steps
            if step.is_asset
        }
        for step, spec in own.items():
            before, after = key_text(playbook.asset_key(step)), key_text(tuple(spec.key.path))
            if before != after:
                renamed.setdefault(before, after)
    return [_renamed(playbook, renamed) for playbook in playbooks], specs


def _translated(step: PlaybookStep, translation: Translation) -> AssetSpec:
    before = asset_spec(step.playbook, step.step)
    after = translation(before, step)
    for name in ("partitions_def", "deps", "skippable"):
        if getattr(after, name) != getattr(before, name):
            raise DagsterInvalidDefinitionError(
                f"the translation of step {step.step.name} of {step.playbook.file} gives it another {name}, "
                "which the playbook itself says"
            )
    return after


def _renamed(playbook: Playbook, renamed: Mapping[str, str]) -> Playbook:
    """A playbook with those of the new keys that concern it."""
    named = {key_text(playbook.asset_key(step.name)) for step in playbook.steps}
    named |= {key_text(source.asset) for step in playbook.steps for source in step.sources.values()}
    own = {before: renamed[before] for before in sorted(named & renamed.keys())}
    return playbook.model_copy(update={"renamed": own}) if own else playbook
