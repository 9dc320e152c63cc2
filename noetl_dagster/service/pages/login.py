"""``/login`` and ``/logout``: a token is exchanged for a cookie, and given back."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import RedirectResponse, Response

from noetl_dagster.service.access import TOKEN_COOKIE, cookies
from noetl_dagster.service.pages.access import FORM_COOKIE, is_own, read_form, set_cookie
from noetl_dagster.service.pages.rendering import page, page_router

router = page_router()

FIRST_PAGE = "/executions"


@router.get("/")
async def first_page() -> Response:
    """Leads to the executions."""
    return RedirectResponse(FIRST_PAGE, 303)


@router.get("/login")
async def ask(request: Request, next: Annotated[str, Query()] = FIRST_PAGE) -> Response:
    """Asks for a token."""
    if not request.app.state.tokens.required:
        return RedirectResponse(FIRST_PAGE, 303)
    return _form(request, next)


@router.post("/login")
async def sign_in(request: Request) -> Response:
    """Puts a token that the service knows into a cookie."""
    fields = await read_form(request)
    wanted, token = fields.get("next", FIRST_PAGE), fields.get("token", "").strip()
    if not is_own(request, fields):
        return _form(request, wanted, "This page was open for too long. Enter the token again.", status=403)
    principal = request.app.state.tokens.principal(token)
    if principal is None:
        return _form(request, wanted, "The service does not know this token.", status=401)
    if not principal.reads_all:
        return _form(request, wanted, "This is the token of a worker. Enter one of a reader or operator.", status=403)
    response = RedirectResponse(local(wanted), 303)
    set_cookie(request, response, TOKEN_COOKIE, token)
    return response


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    """Removes the token from the browser."""
    fields = await read_form(request)
    response = RedirectResponse("/login", 303)
    if is_own(request, fields):
        response.delete_cookie(TOKEN_COOKIE, path="/", httponly=True, samesite="strict")
    return response


def local(address: str) -> str:
    """Returns an address if it is one of this service, else that of the first page."""
    is_local = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if is_local else FIRST_PAGE


def _form(request: Request, wanted: str, error: str = "", *, status: int = 200) -> Response:
    cookie = cookies(dict(request.scope["headers"])).get(FORM_COOKIE)
    form = cookie or secrets.token_urlsafe(24)
    response = page(request, "login.html", None, status=status, form=form, next=local(wanted), error=error)
    if not cookie:
        set_cookie(request, response, FORM_COOKIE, form)
    return response
