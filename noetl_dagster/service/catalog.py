"""``/api/catalog``: register playbooks, and see which versions there are."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from noetl_dagster.events.catalog import PlaybookVersion
from noetl_dagster.events.transport.wire import Name, Text
from noetl_dagster.playbook.catalog import names_version, split_version
from noetl_dagster.service.access import FOR_OPERATORS, FOR_READERS
from noetl_dagster.service.plane import ThePlane
from noetl_dagster.service.problems import RESPONSES, ApiProblem

router = APIRouter(prefix="/api/catalog", tags=["catalog"], responses=RESPONSES)

LENIENT = "unsupported tool kinds and unknown keys are warnings, which executions show; the keys are ignored"

CatalogPath = Annotated[Name, Path(description="catalog path; with @2 or @latest one version, with content")]


class Register(BaseModel, extra="forbid"):
    """``content`` is the text of the playbook; it is registered under its ``metadata.path``."""

    content: Annotated[Text, Field(min_length=1)]
    lenient: bool = Field(False, description=LENIENT)


class RegisteredPlaybook(BaseModel):
    """``new`` is false if the content is already the latest version; ``warnings`` list what it ignores if lenient."""

    new: bool
    version: PlaybookVersion
    warnings: list[str] = []


class Latest(BaseModel):
    """The latest version of each playbook."""

    playbooks: list[PlaybookVersion]


class Versions(BaseModel):
    """Versions of one playbook, the newest first."""

    path: str
    versions: list[PlaybookVersion]


@router.post("", status_code=201, dependencies=[FOR_OPERATORS], responses={200: {"model": RegisteredPlaybook}})
async def register(request: Register, plane: ThePlane, response: Response) -> RegisteredPlaybook:
    """Registers a playbook: content that is not the latest of its path becomes the next version (201, else 200).

    An invalid one is refused with every problem, as ``line:column: message``. It is checked in a process of its own,
    with limits of time and memory.
    """
    draft = await plane.checker.draft(request.content, lenient=request.lenient)
    version, new = await plane.engine.runtime.registered.register(draft)
    if not new:
        response.status_code = 200
    bare = version.model_copy(update={"content": None})
    return RegisteredPlaybook(new=new, version=bare, warnings=list(draft.warnings))


@router.get("", dependencies=[FOR_READERS])
async def list_playbooks(
    plane: ThePlane,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    after: Annotated[Name, Query(description="only paths that come after this one")] = "",
) -> Latest:
    """Lists the latest version of each registered playbook, in the order of their paths."""
    latest = await plane.engine.runtime.registered.latest(limit, after=after)
    return Latest(playbooks=list(latest))


@router.get("/{path:path}", dependencies=[FOR_READERS])
async def list_versions(
    path: CatalogPath,
    plane: ThePlane,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    after: Annotated[int, Query(ge=0, lt=2**31, description="only versions with a larger number")] = 0,
) -> Versions:
    """Lists versions of a playbook, the newest first."""
    registered = plane.engine.runtime.registered
    if names_version(path):
        one = await registered.find(path)
        versions = [one] if one is not None else []
    else:
        versions = await registered.versions(path.strip("/"), limit, after=after)
    if not versions and not (after and await registered.find(path)):
        raise ApiProblem(404, f"no playbook {path!r} is registered")
    return Versions(path=split_version(path)[0], versions=versions)
