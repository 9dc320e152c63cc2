"""Hot routes: what workers ask thousands of times a second, without FastAPI's way to an endpoint.

A :class:`HotRouter` takes endpoints as FastAPI's router does, and declares them to FastAPI for ``/openapi.json``.
:class:`HotRoutes` answers them before FastAPI sees the request: one look into a table, the token, the body read by
its model, the endpoint, its answer as JSON. Limits, counts and problem documents are those of every other route.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, FastAPI, params
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from noetl_dagster.service.access import Requires, Tokens
from noetl_dagster.service.plane import Plane, ThePlane
from noetl_dagster.service.problems import EXPECTED, Problem, malformed, problem_of

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Any]])

_JSON = re.compile(rb"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


class HotRoute:
    """One endpoint that takes POSTs.

    Its parameters may be those of the path, one model for the body, and the plane. It gives a model, or the JSON
    text of one as ``bytes``.

    Raises:
        TypeError: the endpoint asks for something else.
    """

    def __init__(
        self, path: str, endpoint: Callable[..., Awaitable[Any]], status: int, needs: Requires
    ) -> None:
        self.path = path
        self.pattern, _, convertors = compile_path(path)
        self.varies = bool(convertors)
        self._endpoint = endpoint
        self._needs = needs
        self._status = status
        self._of_path: dict[str, TypeAdapter[Any]] = {}
        self._body: tuple[str, type[BaseModel]] | None = None
        self._plane: str | None = None
        for name, kind in self._parameters():
            if name in convertors:
                self._of_path[name] = TypeAdapter(kind)
            elif kind == ThePlane:
                self._plane = name
            elif inspect.isclass(kind) and issubclass(kind, BaseModel) and self._body is None:
                self._body = name, kind
            else:
                raise TypeError(f"{endpoint.__qualname__}: a hot route cannot give {name}: {kind}")

    def _parameters(self) -> Iterable[tuple[str, Any]]:
        hints = get_type_hints(self._endpoint, include_extras=True)
        return ((name, hints[name]) for name in inspect.signature(self._endpoint).parameters)

    async def answer(
        self, app: FastAPI, of_path: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers one request, with a problem document where it is refused."""
        try:
            content = await self._asked(app, of_path, dict(scope["headers"]), receive)
        except EXPECTED as error:
            response = problem_of(error, f"{scope['method']} {scope['path']}")
            await response(scope, receive, send)
            return
        if content is None:  # nobody listens any more
            return
        length = str(len(content)).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _asked(
        self, app: FastAPI, of_path: dict[str, str], headers: dict[bytes, bytes], receive: Receive
    ) -> bytes | None:
        tokens: Tokens = app.state.tokens
        if tokens.required:
            self._needs.check(tokens, _bearer(headers.get(b"authorization", b"")))
        given: dict[str, Any] = {}
        for name, adapter in self._of_path.items():
            try:
                given[name] = adapter.validate_python(of_path[name])
            except ValidationError as error:
                raise malformed(f"path.{name}", error) from None
        if self._body is not None:
            name, model = self._body
            body = await _read(receive)
            if body is None:
                return None
            if not _JSON.match(headers.get(b"content-type", b"")):  # a form of another site's page is none
                raise Problem(422, "body: JSON is needed, with content-type: application/json")
            try:
                given[name] = model.model_validate_json(body)
            except ValidationError as error:
                raise malformed("body", error) from None
        if self._plane is not None:
            plane: Plane = app.state.plane
            given[self._plane] = plane
        found = await self._endpoint(**given)
        return found if isinstance(found, bytes) else found.model_dump_json().encode()


class HotRouter:
    """Collects hot routes that share a prefix.

    Args:
        needs: what a token must be allowed, as a dependency of FastAPI's.
        options: as of FastAPI's router.
    """

    def __init__(self, *, prefix: str, needs: params.Depends, **options: Any) -> None:
        assert isinstance(needs.dependency, Requires)
        self._prefix = prefix
        self._needs = needs.dependency
        self.routes: list[HotRoute] = []
        self.declared = APIRouter(prefix=prefix, dependencies=[needs], **options)

    def post(
        self, path: str, *, status_code: int = 200, gives: type[BaseModel] | None = None
    ) -> Callable[[Endpoint], Endpoint]:
        """Has an endpoint answer POSTs.

        Args:
            gives: the model of the answer, for the document, where the endpoint gives ``bytes``.
        """

        def add(endpoint: Endpoint) -> Endpoint:
            self.routes.append(HotRoute(self._prefix + path, endpoint, status_code, self._needs))
            model = gives or get_type_hints(endpoint)["return"]
            self.declared.post(path, status_code=status_code, response_model=model)(endpoint)
            return endpoint

        return add


class HotRoutes:
    """ASGI middleware: answers the hot routes, and hands everything else on."""

    def __init__(self, app: ASGIApp, *, service: FastAPI, routers: Iterable[HotRouter]) -> None:
        self._app = app
        self._service = service
        routes = [route for router in routers for route in router.routes]
        self._fixed = {route.path: route for route in routes if not route.varies}
        self._varying = [route for route in routes if route.varies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            if (route := self._fixed.get(path)) is not None:
                scope["route"] = route
                await route.answer(self._service, {}, scope, receive, send)
                return
            for route in self._varying:
                if (found := route.pattern.match(path)) is not None:
                    scope["route"] = route
                    await route.answer(self._service, found.groupdict(), scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _bearer(authorization: bytes) -> str | None:
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def _read(receive: Receive) -> bytes | None:
    """The body of a request; None when the client has gone."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        return body
    parts = []
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    return None
