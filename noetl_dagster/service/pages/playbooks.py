"""``/playbooks``: registered playbooks and those of the service's folder; one with its text, graph and executions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from markupsafe import Markup, escape
from starlette.responses import Response

from noetl_dagster.engine.executions.addresses import from_path
from noetl_dagster.engine.executions.listing import ExecutionFilter, ListedExecution, list_executions
from noetl_dagster.errors import PlaybookError
from noetl_dagster.events import queries
from noetl_dagster.events.catalog import PlaybookVersion
from noetl_dagster.playbook.catalog import names_version, split_version
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.service.pages.access import TheViewer
from noetl_dagster.service.pages.graph import graph_svg
from noetl_dagster.service.pages.rendering import LONGEST_TEXT, page, page_router, visible
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import ApiProblem

router = page_router()

SHOWN = 200
"""Playbooks of a list."""

EXECUTIONS, VERSIONS, PROBLEMS = 50, 50, 20
"""What the page of a playbook shows of each, the newest first."""

LINES = 20_000
"""Lines of a text that are shown."""

_LINE_ENDS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Where YAML ends a line, so that numbers of lines are those of messages."""

_LINE = (  # formatted without markupsafe, which would take a second for a long text
    '<li id="L{0}"><a class="at" tabindex="-1" href="#L{0}" aria-label="Line {0}">{0}</a><code>{1}</code></li>'
)

# The text that an execution runs.
TEXT_THAT_RAN = """
SELECT catalog.* FROM noetl.catalog WHERE catalog_id = (
    SELECT catalog_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'playbook.initialized' LIMIT 1)
"""


@dataclass(frozen=True, slots=True)
class ListedPlaybook:
    """A playbook of the list.

    Attributes:
        files: names of the files of the service's folder that have this path.
        latest: the latest registered version.
    """

    path: str
    files: tuple[str, ...] = ()
    latest: PlaybookVersion | None = None

    @property
    def description(self) -> str:
        """The description in the metadata of the registered version."""
        return str(self.latest.meta.get("description") or "") if self.latest else ""


@dataclass(frozen=True, slots=True)
class ShownText:
    """The text of a playbook, from wherever it is.

    Attributes:
        origin: where it is from, in words.
        playbook: what it means; None if it is invalid, for reasons that are in ``problems``.
    """

    path: str
    origin: str
    text: str
    playbook: Playbook | None = None
    version: int | None = None
    problems: tuple[str, ...] = ()

    def numbered(self) -> tuple[Markup, int]:
        """Returns the first :data:`LINES` lines as list items, known secrets masked, and how many others follow."""
        lines = _LINE_ENDS.split(SECRETS.redact(self.text))
        items = (_LINE.format(number, escape(_shortened(line))) for number, line in enumerate(lines[:LINES], start=1))
        return Markup("\n".join(items)), max(len(lines) - LINES, 0)


def _shortened(line: str) -> str:
    return visible(line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}…")


@router.get("/playbooks")
async def playbooks(request: Request, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows the playbooks in the order of their paths."""
    after = request.query_params.get("after", "").replace("\x00", "")[:500]
    listed = await list_playbooks(plane, after, SHOWN + 1)
    further = urlencode({"after": listed[SHOWN - 1].path}) if len(listed) > SHOWN else ""
    return page(request, "playbooks.html", viewer, playbooks=listed[:SHOWN], further=further, after=after)


async def list_playbooks(plane: Plane, after: str, limit: int) -> list[ListedPlaybook]:
    """Returns playbooks whose paths come after one, in their order: registered ones and those of the folder."""
    registered = {one.path: one for one in await plane.engine.runtime.registered.latest(limit, after=after)}
    files = await asyncio.to_thread(lambda: plane.catalog.paths)  # the first time, it reads the folder
    paths = sorted({*registered, *(path for path in files if path > after)})[:limit]
    folder = plane.catalog.folder
    return [
        ListedPlaybook(path, tuple(_below(file, folder) for file in files.get(path, ())), registered.get(path))
        for path in paths
    ]


def _below(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name


@router.get("/playbooks/{reference:path}")
async def playbook(request: Request, reference: str, plane: ThePlane, viewer: TheViewer) -> Response:
    """Shows one playbook: its graph, its newest executions, its versions and its text.

    The address names a path, of a registered version also ``path@2``. With ``execution`` in its query, the page shows
    the text that this execution runs.
    """
    if "\x00" in from_path(reference) or len(reference) > 2_000:
        raise ApiProblem(404, "no such playbook")
    shown = await _shown(plane, from_path(reference).strip("/"), request.query_params)
    executions, is_complete = await _executions(plane, shown.path)
    versions = await plane.engine.runtime.registered.versions(shown.path, VERSIONS)
    lines, more = shown.numbered()
    return page(
        request,
        "playbook.html",
        viewer,
        shown=shown,
        graph=_graph(shown.playbook),
        executions=[_row(one) for one in executions],
        is_complete=is_complete,
        versions=versions,
        lines=lines,
        more=more,
        in_folder=shown.path in plane.catalog.paths,
    )


async def _shown(plane: Plane, reference: str, query: Mapping[str, str]) -> ShownText:
    registered = plane.engine.runtime.registered
    if "execution" in query:
        return await _text_that_ran(plane, query["execution"], reference)
    if not names_version(reference) and reference in plane.catalog.paths:
        return await asyncio.to_thread(_text_of_folder, plane, reference)
    if (stored := await registered.find(reference)) is not None:
        return await _as_shown(
            stored.path,
            stored.version,
            stored.content or "",
            stored.meta,
            None,
        )
    path, version = split_version(reference)
    row = await plane.engine.runtime.pool.fetchrow(queries.CATALOG_VERSION, path, version, 0)
    if row is None or names_version(reference):
        raise ApiProblem(404, f"no playbook {reference!r} is registered, in the service's folder, or has ever run")
    return await _as_shown(path, 0, row["content"], row["meta"], row["model"])


async def _text_that_ran(plane: Plane, execution: str, reference: str) -> ShownText:
    row = None
    if len(execution) < 20 and execution.isdecimal() and int(execution) < 2**63:
        row = await plane.engine.runtime.pool.fetchrow(TEXT_THAT_RAN, int(execution))
    if row is None or row["path"] != split_version(reference)[0]:
        raise ApiProblem(404, f"no execution {execution!r} of playbook {reference!r} is in the event log")
    return await _as_shown(row["path"], row["version"], row["content"], row["meta"], row["model"])


def _text_of_folder(plane: Plane, path: str) -> ShownText:
    """Reads a file of the folder; runs in a thread."""
    [file, *others] = plane.catalog.paths[path]
    origin = f"file {_below(file, plane.catalog.folder)}"
    try:
        playbook = plane.catalog.load(path, lenient=True)
        return ShownText(path, origin, playbook.source, playbook)
    except PlaybookError as error:
        problems = _problems(error)
    most = plane.engine.runtime.settings.playbook_bytes
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(most)
    except OSError as error:
        text, problems = "", (f"{file.name} cannot be read: {error.strerror}",)
    return ShownText(path, origin if not others else f"{origin} and others", text, problems=problems)


async def _as_shown(path: str, version: int, text: str, meta: Mapping[str, Any], model: str | None) -> ShownText:
    origin = f"version {version}, registered" if version else "text that ran from a file"
    try:
        file = f"{path}@{version}" if version else path
        playbook = await asyncio.to_thread(parse_playbook, text, file=file, lenient=True, model=model)  # only shown
    except PlaybookError as error:
        return ShownText(path, origin, text, None, version or None, _problems(error))
    return ShownText(path, origin, text, playbook, version or None)


def _problems(error: PlaybookError) -> tuple[str, ...]:
    return tuple(str(one) for one in error.problems[:PROBLEMS])


def _graph(playbook: Playbook | None) -> Markup:
    if playbook is None:
        return Markup("")
    lines = {step.name: step.place.line for step in playbook.steps if step.place is not None}
    return graph_svg(playbook, link=lambda step: f"#L{lines.get(step, 1)}")


async def _executions(plane: Plane, path: str) -> tuple[list[ListedExecution], bool]:
    """Returns the newest executions of a playbook; false if the log is too long to be searched for more."""
    try:
        return await list_executions(plane.engine.runtime.pool, ExecutionFilter(playbook=path), EXECUTIONS), True
    except TimeoutError:
        return [], False


def _row(one: ListedExecution) -> dict[str, Any]:
    names = ("execution_id", "partition", "status", "started_at", "error")
    seconds = ((one.ended_at or datetime.now(UTC)) - one.started_at).total_seconds()
    return {name: getattr(one, name) for name in names} | {"seconds": seconds}
