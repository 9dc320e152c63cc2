"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response

from noetl_dagster.service import commands, events, executions, health, workers
from noetl_dagster.service.access import Limits, Tokens
from noetl_dagster.service.plane import Plane
from noetl_dagster.service.problems import handle_problems
from noetl_dagster.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


def create_app(settings: Settings, plane: Callable[[], AbstractAsyncContextManager[Plane]]) -> FastAPI:
    """The service.

    Args:
        plane: opens what requests work with, when the application starts.

    Raises:
        ServiceError: the tokens of the settings cannot be read.
    """
    tokens = Tokens.parse(settings.service_tokens)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with plane() as opened:
            app.state.plane = opened
            yield

    app = FastAPI(
        title="NoETL on Dagster",
        description="Events, claims, executions, workers and results. See docs/protocol.md for workers.",
        version=version("noetl-dagster"),
        lifespan=lifespan,
    )
    app.state.tokens = tokens
    handle_problems(app)
    for module in (events, commands, executions, workers, health):
        app.include_router(module.router)

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        route = getattr(request.scope.get("route"), "path", "none")
        app.state.plane.metrics.requests.labels(request.method, route, response.status_code).inc()
        return response

    app.add_middleware(Limits, body_bytes=settings.service_body_bytes, rate=settings.service_rate)
    if not tokens.required:  # without tokens a page in a browser must not reach us under another name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    return app
