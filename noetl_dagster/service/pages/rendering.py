"""Renders pages, and makes their routes. Everything from playbooks, results and workers is text, never markup."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from noetl_dagster.engine.executions.addresses import in_path
from noetl_dagster.engine.executions.progress import brief, duration, per_second
from noetl_dagster.events.transport.wire import message_of
from noetl_dagster.events.types import Event
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.service.pages.access import Viewer, secure_headers, viewer_of
from noetl_dagster.service.problems import EXPECTED, ApiProblem, problem_of

FOLDER = Path(__file__).parent

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)

LONGEST_TEXT = 10_000
"""Characters of one text that a page shows."""

MOST_ROWS, MOST_COLUMNS = 50, 40
"""Rows and columns of a value that is shown as a table."""

ELLIPSIS = "\u2026"

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters without a shape, without tab and line feed. Some change the order of others."""


def visible(text: str) -> str:
    """Returns a text whose characters can all be seen: ``⟨U+202E⟩`` stands for the one that turns text around."""
    return _HIDDEN.sub(lambda hidden: f"⟨U+{ord(hidden[0]):04X}⟩", text)


def cells(text: str) -> int:
    """Returns the width of a text in monospaced characters; wide characters count twice."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


def shortened(text: str, most: int) -> str:
    """Returns a visible text of at most so many cells, with an ellipsis at the end if it is longer."""
    text = visible(text[: most + 1])
    if cells(text) <= most:
        return text
    while cells(text) >= most:
        text = text[:-1]
    return text + ELLIPSIS


def counted(number: int, noun: str) -> str:
    """Formats ``1 visit`` and ``1,200 visits``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compact(number: int) -> str:
    """Formats a count in at most six characters: ``99,999``, ``100k``, ``1.2M``."""
    for size, unit in ((10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number // (size // 10) / 10:g}{unit}"
    return f"{number // 1000}k" if number >= 100_000 else f"{number:,}"


def _finalize(value: Any) -> Any:
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = visible(SECRETS.beginning(value, LONGEST_TEXT))
    return text if len(value) <= LONGEST_TEXT else f"{text}… ({len(value) - LONGEST_TEXT:,} more characters)"


def as_json(value: Any, *, indent: bool = False) -> str:
    """Formats a value as JSON."""
    option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    return orjson.dumps(value, default=str, option=option).decode()


def seconds(value: float | None) -> str:
    """Formats a duration in seconds: ``4 ms``, ``3 min 20 s``."""
    return "" if value is None else brief(value)


def moment(value: datetime | None) -> Markup:
    """Formats a time; the browser shows it in its own time zone."""
    if value is None:
        return Markup("")
    at = value.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")


def count(value: int) -> str:
    """Formats a number: ``1,000,000``."""
    return f"{value:,}"


def playbook_address(path: str, version: int | None = None) -> str:
    """Returns the address of the page of a playbook, or of one of its registered versions."""
    parts = "/".join(map(in_path, path.split("/")))
    return f"/playbooks/{parts}@{version}" if version else f"/playbooks/{parts}"


def size(value: int) -> str:
    """Formats a number of bytes: ``12 kB``."""
    scaled = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if scaled < 1000:
            return f"{scaled:.3g} {unit}"
        scaled /= 1000
    return f"{scaled:.3g} TB"


class Table(NamedTuple):
    """Rows of a value, the names of their columns, and how many rows are left out."""

    rows: list[dict[str, Any]]
    columns: list[str]
    more: int


def as_table(value: Any) -> Table | None:
    """Returns a value as a table if it is a list of mappings, or a mapping with such ``rows``; else None."""
    rows = value.get("rows") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows[:MOST_ROWS]):
        return None
    shown = rows[:MOST_ROWS]
    columns = list(dict.fromkeys(name for row in shown for name in row))
    return Table(shown, columns, len(rows) - len(shown)) if 0 < len(columns) <= MOST_COLUMNS else None


def event_json(event: Event) -> str:
    """Formats an event as indented JSON."""
    return as_json(message_of(event), indent=True)


def _digest() -> str:
    """Returns a digest of the static files, which their addresses contain: browsers keep them until they change."""
    whole = hashlib.sha256()
    for file in sorted((FOLDER / "static").iterdir()):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters.update(
    seconds=seconds,
    moment=moment,
    count=count,
    as_json=as_json,
    in_path=in_path,
    size=size,
    duration=duration,
    per_second=per_second,
)
_ENVIRONMENT.globals.update(
    playbook_address=playbook_address, version=_digest(), counted=counted, as_table=as_table, event_json=event_json
)


def fragment(template: str, **names: Any) -> Markup:
    """Renders a part of a page; the names that a template needs are its arguments."""
    return Markup(_ENVIRONMENT.get_template(template).render(**names))


def page(request: Request, template: str, viewer: Viewer | None, *, status: int = 200, **names: Any) -> HTMLResponse:
    """Renders a page for a viewer, with headers that keep other sites and scripts out."""
    names = {"viewer": viewer, "path": request.url.path, **names}
    text = _ENVIRONMENT.get_template(template).render(**names)
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, **secure_headers()}
    response = HTMLResponse(text, status, headers)
    if viewer is not None:
        viewer.remember(request, response)
    return response


_SLOW = "the filters match too little of a long log to be found in time; choose a shorter time or fewer filters"


class _PageRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except TimeoutError:
                return problem_page(request, ApiProblem(503, _SLOW))
            except EXPECTED as error:
                return problem_page(request, error)

        return answer


def problem_page(request: Request, error: Exception) -> Response:
    """Returns the page of an expected error; its text and status are those of the problem document."""
    document = problem_of(error, f"{request.method} {request.url.path}")
    try:
        viewer = viewer_of(request)
    except ApiProblem:
        viewer = None
    problem = orjson.loads(document.body)
    return page(request, "problem.html", viewer, status=document.status_code, problem=problem)


def page_router() -> APIRouter:
    """Returns a router for pages, which are not part of the API's description."""
    return APIRouter(route_class=_PageRoute, include_in_schema=False)
