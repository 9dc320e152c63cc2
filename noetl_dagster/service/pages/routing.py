"""Routes of pages: an expected error is shown as a page."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from noetl_dagster.service.pages.access import viewer_of
from noetl_dagster.service.pages.rendering import page
from noetl_dagster.service.problems import EXPECTED, ApiProblem, problem_of

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
