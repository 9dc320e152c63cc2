"""The playbooks of a folder as a component of ``dg`` projects."""

from __future__ import annotations

from functools import cache
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any

from dagster import (
    Component,
    ComponentLoadContext,
    Definitions,
    EnvVar,
    Model,
    Resolvable,
    Scaffolder,
    ScaffoldRequest,
    scaffold_with,
)
from dagster.components import scaffold_component
from dagster.components.component.component import ComponentTypeSpec
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field

from noetl_dagster.code_location.definitions import load_playbooks
from noetl_dagster.code_location.folder import PlaybookStep
from noetl_dagster.code_location.scaffold import new_playbook
from noetl_dagster.compiler.names import NOETL
from noetl_dagster.resources.noetl import NoetlResource


class PlaybooksScaffoldParams(BaseModel):
    """Options of ``dg scaffold defs``."""

    path: str = Field("playbooks", description="Folder of the playbooks, below the component's own")


class PlaybooksScaffolder(Scaffolder[PlaybooksScaffoldParams]):
    """Writes ``defs.yaml`` and a first playbook."""

    @classmethod
    def get_scaffold_params(cls) -> type[PlaybooksScaffoldParams]:
        """Returns the model of the options."""
        return PlaybooksScaffoldParams

    def scaffold(self, request: ScaffoldRequest[PlaybooksScaffoldParams]) -> None:
        """Writes the files, and keeps a playbook that exists."""
        folder = request.target_path / request.params.path
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / "squares.yaml"
        if not first.exists():
            first.write_text(new_playbook("squares", path=f"{request.target_path.name}/squares"), encoding="utf-8")
        scaffold_component(request, {"path": request.params.path})


@scaffold_with(PlaybooksScaffolder)
class PlaybooksComponent(Component, Resolvable, Model):
    """NoETL playbooks: a job for each, the results of its steps as assets with their checks.

    Examples:
        .. code-block:: yaml

            type: noetl_dagster.PlaybooksComponent
            attributes:
              path: playbooks
              exclude: [drafts/*]
              noetl: {db_url: {env: LAKE_DB_URL}, minio_bucket: lake}
              translation:
                key: "lake/{{ playbook.name }}/{{ step.name }}"
                group_name: "{{ playbook.name }}"
                tags: {tools: "{{ kinds | join('-') }}"}
    """

    path: str = Field("playbooks", description="Folder of the playbooks: absolute, or below the component's own folder")
    include: list[str] = Field(default_factory=list, description="Patterns of files below it; none: every playbook")
    exclude: list[str] = Field(default_factory=list, description="Patterns of files to leave out")
    lenient: bool = Field(False, description="Unsupported tool kinds and unknown keys are warnings of executions")
    noetl: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings, by the fields of NoetlResource; {env: NAME} stands for a variable. "
        "All components of a project have the same",
    )
    control: bool = Field(True, description="With upkeep and projection, which a project has once")
    translation: (
        Annotated[
            TranslationFn[PlaybookStep],
            TranslationFnResolver(
                template_vars_for_translation_fn=lambda one: {
                    "playbook": one.playbook,
                    "step": one.step,
                    "kinds": one.kinds,
                }
            ),
        ]
        | None
    ) = None

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """Describes the component to ``dg``."""
        return ComponentTypeSpec(
            description="NoETL playbooks as jobs and assets",
            tags=["noetl", "playbooks"],
            produces=["asset", "asset_check", "job", "schedule", "sensor", "resource"],
        )

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Loads the playbooks of the component's folder."""
        resources = {NOETL: _resource(dumps(self.noetl, sort_keys=True))} if self.noetl else {}
        return load_playbooks(
            Path(context.path, self.path),
            include=self.include,
            exclude=self.exclude,
            lenient=self.lenient,
            resources=resources,
            translation=self.translation,
            control=self.control,
        )


@cache
def _resource(fields: str) -> NoetlResource:
    """Returns the same object for the same fields, in JSON: components of one project must share a resource."""
    values = loads(fields)
    for name, value in values.items():
        if isinstance(value, dict) and set(value) == {"env"}:  # as Dagster writes it in run config
            values[name] = EnvVar(str(value["env"]))
    return NoetlResource(**values)
