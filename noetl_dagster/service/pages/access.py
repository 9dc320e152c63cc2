"""Who looks at a page: a token in a cookie, and the field that shows that a form is the page's own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request
from starlette.responses import Response

from noetl_dagster.service.access import cookies, token_in
from noetl_dagster.service.problems import ApiProblem
from noetl_dagster.service.tokens import Principal, TokenScope

FORM_COOKIE = "noetl_form"
FORM_FIELD = "form_token"

KEPT_SECONDS = 30 * 86_400
"""Time after which a browser forgets a token."""

MOST_FORM_BYTES = 64 * 1024
MOST_FIELDS = 100


def secure_headers() -> dict[str, str]:
    """Returns headers of every page: nothing is cached, guessed, framed, or told to other sites."""
    return {
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",  # with no-referrer, browsers send forms of this site with "Origin: null"
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person who looks at a page.

    Attributes:
        form: the value that forms of the page contain, and that only the browser of this person sends in a cookie.
        signed_in: the person has given a token, and may give it back.
        is_new: the browser does not have ``form`` yet.
    """

    principal: Principal
    form: str
    signed_in: bool
    is_new: bool = False

    @property
    def may_operate(self) -> bool:
        """True if the token may cancel, resume and reprocess."""
        return TokenScope.OPERATOR in self.principal.scopes

    def remember(self, request: Request, response: Response) -> None:
        """Gives the browser the value that it sends with forms."""
        if self.is_new:
            set_cookie(request, response, FORM_COOKIE, self.form)


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """Sets a cookie that scripts cannot read, and that no request of another site carries."""
    response.set_cookie(
        name,
        quote(value, safe=""),
        max_age=KEPT_SECONDS,
        path="/",
        secure=request.app.state.is_https or request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def viewer_of(request: Request) -> Viewer:
    """Returns who looks at a page.

    Raises:
        ApiProblem: 403, the token may not read.
    """
    headers = dict(request.scope["headers"])
    tokens = request.app.state.tokens
    principal = tokens.principal(token_in(headers))
    if principal is None:  # the checks of requests refuse this earlier
        raise ApiProblem(401, "a token is needed")
    if not principal.reads_all:
        raise ApiProblem(403, "pages need a token with the scope reader or operator; this one is a worker's")
    form = cookies(headers).get(FORM_COOKIE, "")
    return Viewer(principal, form or secrets.token_urlsafe(24), signed_in=tokens.required, is_new=not form)


async def viewer_(request: Request) -> Viewer:  # async, so that FastAPI needs no thread
    """Dependency: who looks at the page."""
    return viewer_of(request)


async def read_form(request: Request) -> dict[str, str]:
    """Returns the fields of a form, without those that occur again.

    Raises:
        ApiProblem: 413 or 422, it is too large.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_FORM_BYTES:
            raise ApiProblem(413, f"the form is larger than {MOST_FORM_BYTES} bytes")
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise ApiProblem(422, f"the form has more than {MOST_FIELDS} fields") from None


def is_own(request: Request, fields: Mapping[str, str]) -> bool:
    """Reports whether a form comes from a page that this browser received."""
    own = cookies(dict(request.scope["headers"])).get(FORM_COOKIE, "")
    return bool(own) and secrets.compare_digest(fields.get(FORM_FIELD, "").encode(), own.encode())


@dataclass(frozen=True, slots=True)
class Submitted:
    """A form that an operator sent from a page of this service."""

    viewer: Viewer
    fields: Mapping[str, str]


async def submitted(request: Request) -> Submitted:
    """Dependency: a form of an operator.

    Raises:
        ApiProblem: 403, the token may not operate, or the form does not come from a page that this browser received.
    """
    viewer = viewer_of(request)
    if not viewer.may_operate:
        raise ApiProblem(403, "the token lacks the scope operator")
    fields = await read_form(request)
    if not is_own(request, fields):
        raise ApiProblem(403, "the form does not come from a page of this service; load the page again, and repeat")
    return Submitted(viewer, fields)


TheViewer = Annotated[Viewer, Depends(viewer_)]
TheForm = Annotated[Submitted, Depends(submitted)]
