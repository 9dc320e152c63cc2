"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import Counter
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noetl_dagster.service import catalog, commands, executions, health, workers
from noetl_dagster.service.pages import execution, login, playbooks, results, steps, trail
from noetl_dagster.service.pages import executions as executions_page
from noetl_dagster.service.pages import workers as workers_page
from noetl_dagster.service.pages.live import LiveExecutions
from noetl_dagster.service.pages.rendering import FOLDER
from noetl_dagster.service.plane import Plane
from noetl_dagster.service.problems import handle_problems
from noetl_dagster.service.requests import API, DECLARES_CLIENT, RequestChecks
from noetl_dagster.service.tokens import parse_tokens
from noetl_dagster.settings import Settings

LOOPBACK = ["127.0.0.1", "localhost", "[::1]", "::1"]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})
"""Methods that may become labels of metrics; clients can invent others."""

MODULES = (commands, catalog, executions, workers, health)
"""Modules with routes, in order: ``/api/catalog/<number>`` of ``commands`` comes before the paths of ``catalog``."""


PAGES = (login, executions_page, execution, steps, results, trail, workers_page, playbooks)
"""Modules with pages for people."""


def create_app(settings: Settings, plane: Callable[[], AbstractAsyncContextManager[Plane]]) -> FastAPI:
    """Returns the application; ``plane`` opens the components that requests use, when it starts."""
    tokens = parse_tokens(settings.service_tokens)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with plane() as opened:
            app.state.plane = opened
            yield

    app = FastAPI(
        title="NoETL on Dagster",
        description="Events, claims, executions, workers and results. Workers: docs/reference/worker-protocol.md.",
        version=version("noetl-dagster"),
        lifespan=lifespan,
    )
    app.state.tokens = tokens
    app.state.is_https = settings.service_tls_cert is not None or settings.service_tls_terminated
    handle_problems(app)
    for router in (commands.workers, *(module.router for module in MODULES)):
        declared = [DECLARES_CLIENT] if router.prefix.startswith(API.rstrip("/")) and not tokens.required else []
        app.include_router(router, dependencies=declared)
    _add_pages(app)
    # each one wraps the previous ones
    documents = (app.openapi_url, app.docs_url, app.swagger_ui_oauth2_redirect_url, app.redoc_url)
    app.add_middleware(
        RequestChecks,
        tokens=tokens,
        body_bytes=settings.service_body_bytes,
        rate=settings.service_rate,
        for_readers=[path for path in documents if path is not None],
    )
    if not tokens.required:  # a page in a browser must not reach the API under another host name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)
    app.add_middleware(Counting, service=app)
    return app


def _add_pages(app: FastAPI) -> None:
    """Adds the routes of the pages, and their static files."""
    app.state.listings = {}
    app.state.live = LiveExecutions()
    for module in PAGES:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")


class Counting:
    """ASGI middleware: counts every request by method, route and status, refused ones included."""

    def __init__(self, app: ASGIApp, *, service: FastAPI) -> None:
        self._app = app
        self._service = service
        self._counters: dict[tuple[str, str, int], Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # that of a request that ends with a defect

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._count(scope, status)

    def _count(self, scope: Scope, status: int) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        key = method, getattr(scope.get("route"), "path", "none"), status
        counter = self._counters.get(key)
        if counter is None:  # the library would look up the labels each time
            counter = self._counters[key] = self._service.state.plane.metrics.requests.labels(*key)
        counter.inc()
