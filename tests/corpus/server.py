"""A web service with pages, faults and limits, for playbooks to talk to."""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from contextlib import AbstractContextManager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.serving import served

ITEMS = 23
_calls: Counter[str] = Counter()


async def pages(request: Request) -> Response:
    """``?page=1&size=5``: {data, paging: {page, pages, hasMore}, links: {next}}, and a header ``Link``.

    The link to the next page is relative, and has further parameters. After page ``stuck``, it leads to that page.
    """
    page, size = int(request.query_params.get("page", 1)), int(request.query_params.get("size", 10))
    numbers = list(range(ITEMS))[(page - 1) * size : page * size]
    paging = {"page": page, "pages": -(-ITEMS // size), "hasMore": page * size < ITEMS}
    stuck = request.query_params.get("stuck")
    following = page + 1 if stuck is None else min(page + 1, int(stuck))
    link = f"pages?page={following}&size={size}&t={following}%2C1" + (f"&stuck={stuck}" if stuck else "")
    links = {"next": link} if paging["hasMore"] else {}
    headers = {"Link": f'</pages?page=1>; rel="first", <{link}>; rel="next last"'} if links else {}
    body = {"data": [{"id": number} for number in numbers], "paging": paging, "links": links}
    return JSONResponse(body, headers=headers)


async def offset(request: Request) -> Response:
    """``?skip=5&limit=10``: {items, total}; at most 8 items. With ``shrinks``, the last 5 are gone after the first 8."""
    skip, limit = int(request.query_params.get("skip", 0)), min(int(request.query_params.get("limit", 10)), 8)
    total = ITEMS - 5 * (skip > 0 and "shrinks" in request.query_params)
    return JSONResponse({"items": list(range(total))[skip : skip + limit], "total": total})


async def cursor(request: Request) -> Response:
    """``?after=5``: {items, next}."""
    after = int(request.query_params.get("after", 0))
    items = list(range(after, min(after + 8, ITEMS)))
    return JSONResponse({"items": items, "next": after + 8 if after + 8 < ITEMS else None})


async def flaky(request: Request) -> Response:
    """``/flaky/{key}?fails=2&status=503``: that many failures for each key, then {ok, calls}."""
    key = request.path_params["key"]
    _calls[key] += 1
    if _calls[key] <= int(request.query_params.get("fails", 2)):
        status = int(request.query_params.get("status", 503))
        return JSONResponse({"reason": "not now"}, status_code=status)
    return JSONResponse({"ok": True, "calls": _calls[key]})


async def flaky_pages(request: Request) -> Response:
    """``/flaky-pages/{key}?page=1``: each page fails once before it comes."""
    key = f"{request.path_params['key']}:{request.query_params.get('page', 1)}"
    _calls[key] += 1
    if _calls[key] == 1:
        return JSONResponse({"reason": "not now"}, status_code=503)
    return await pages(request)


async def status(request: Request) -> Response:
    return JSONResponse({"reason": "as asked"}, status_code=request.path_params["code"])


async def echo(request: Request) -> Response:
    body = (await request.body()).decode()
    seen = {"method": request.method, "query": dict(request.query_params), "body": body}
    seen["headers"] = {key: value for key, value in request.headers.items() if key.startswith("x-")}
    return JSONResponse(seen)


async def token(request: Request) -> Response:
    """Issues a token that is valid for one request to ``/me``."""
    _calls["tokens"] += 1
    name, password = b64decode(request.headers["authorization"].removeprefix("Basic ")).decode().split(":")
    if (name, password) != ("etl", "corpus-client-secret"):
        return JSONResponse({"error": "invalid_client"}, status_code=401)
    return JSONResponse({"access_token": f"corpus-access-token-{_calls['tokens']}", "expires_in": 3600})


async def me(request: Request) -> Response:
    """Answers to the bearer of a token, once for each."""
    _calls[header := request.headers.get("authorization", "")] += 1
    is_known = header.startswith("Bearer corpus-access-token-") and _calls[header] == 1
    return JSONResponse({"name": "etl"}, status_code=200 if is_known else 401)


async def text(request: Request) -> Response:
    return PlainTextResponse("plain words")


ANY = ["GET", "POST", "PUT", "PATCH", "DELETE"]
ROUTES = [
    Route("/pages", pages),
    Route("/cursor", cursor),
    Route("/offset", offset),
    Route("/flaky/{key}", flaky, methods=ANY),
    Route("/flaky-pages/{key}", flaky_pages),
    Route("/status/{code:int}", status),
    Route("/text", text),
    Route("/token", token, methods=["POST"]),
    Route("/me", me),
    Route("/echo", echo, methods=ANY),
]


def serving() -> AbstractContextManager[str]:
    """Runs the service in a thread; gives its address."""
    return served(Starlette(routes=ROUTES))
