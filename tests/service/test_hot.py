"""Hot routes alone: they answer as FastAPI's own would, and are in the document with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field, SecretStr
from starlette.types import ASGIApp

from noetl_dagster.events.transport.wire import Id
from noetl_dagster.service.access import FOR_WORKERS, Worker
from noetl_dagster.service.hot import HotRouter, HotRoutes
from noetl_dagster.service.plane import ThePlane
from noetl_dagster.service.problems import RESPONSES, handle_problems
from noetl_dagster.service.tokens import parse_tokens
from tests.service.conftest import Service

hot = HotRouter(prefix="/hot", needs=FOR_WORKERS, tags=["hot"], responses=RESPONSES)


class Asked(BaseModel):
    id: Id
    names: Annotated[list[str], Field(max_length=2)] = Field(default_factory=list)


class Answer(BaseModel):
    text: str


@hot.post("/given", status_code=202)
async def given(asked: Asked, plane: ThePlane, sender: Worker) -> Answer:
    """Says what it was asked."""
    return Answer(text=f"{plane} {asked.id} {asked.names}")


@hot.post("/bytes", returns=Answer)
async def as_bytes(asked: Asked, plane: ThePlane, sender: Worker) -> bytes:
    return b'{"text": "as it is"}'


@hot.post("/away")
async def away(asked: Asked, plane: ThePlane, sender: Worker) -> Answer:
    raise ConnectionRefusedError


def application(tokens: str | None = None) -> ASGIApp:
    app = FastAPI()
    app.state.plane = "the plane"
    app.state.tokens = parse_tokens(SecretStr(tokens) if tokens else None)
    handle_problems(app)
    app.include_router(hot.declared)
    app.add_middleware(HotRoutes, service=app, router=hot)
    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application())
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


async def test_parameters_and_answers(client: httpx.AsyncClient) -> None:
    found = await client.post("/hot/given", json={"id": "7", "names": ["x"]})
    assert (found.status_code, found.json()) == (202, {"text": "the plane 7 ['x']"})
    assert found.headers["content-type"] == "application/json"
    found = await client.post("/hot/bytes", json={"id": 7})
    assert (found.status_code, found.content) == (200, b'{"text": "as it is"}')


async def test_a_body_in_pieces(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"id"', b": ", b"7}"):
            yield piece

    headers = {"content-type": "Application/vnd.noetl+JSON; charset=utf-8"}
    found = await client.post("/hot/given", content=pieces(), headers=headers)
    assert found.json() == {"text": "the plane 7 []"}


@pytest.mark.parametrize(
    ("path", "content", "detail"),
    [
        ("/hot/bytes", b"{", "body: Invalid JSON"),
        ("/hot/bytes", b"", "body: Invalid JSON"),
        ("/hot/bytes", b"[]", "body: Input should be an object"),
        ("/hot/bytes", b"{}", "body.id: Field required"),
        ("/hot/bytes", b'{"id": -1}', "body.id: Input should be greater"),
        ("/hot/bytes", b'{"id": 1, "names": ["a", 2]}', "body.names.1: "),
    ],
)
async def test_what_is_malformed(client: httpx.AsyncClient, path: str, content: bytes, detail: str) -> None:
    found = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert found.status_code == 422
    assert found.headers["content-type"] == "application/problem+json"
    assert found.json()["detail"].startswith(detail)


async def test_errors_are_problems(client: httpx.AsyncClient) -> None:
    found = await client.post("/hot/away", json={"id": 1})
    assert (found.status_code, found.headers["retry-after"]) == (503, "1")
    assert (await client.get("/hot/bytes")).status_code == 405


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer unknown", 401),
        ("Basic worker", 401),
        ("Bearer", 401),
        ("Bearer reader", 403),
        ("Bearer worker", 200),
        ("bearer worker", 200),
    ],
)
async def test_tokens_come_before_anything_else(authorization: str | None, status: int) -> None:
    app = application('{"worker": ["pool:default"], "reader": ["reader"]}')
    headers = {"content-type": "application/json"} | ({"authorization": authorization} if authorization else {})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        for content, expected in ((b'{"id": 1}', status), (b"{", 422 if status == 200 else status)):
            found = await client.post("/hot/bytes", content=content, headers=headers)
            assert found.status_code == expected
            assert ("www-authenticate" in found.headers) == (status == 401)


async def test_the_document_has_them(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"]["/hot/given"]["post"]
    assert operation["description"] == "Says what it was asked."
    [body] = operation["requestBody"]["content"].values()
    assert body["schema"] == {"$ref": "#/components/schemas/Asked"}
    assert "202" in operation["responses"]
    [answer] = document["paths"]["/hot/bytes"]["post"]["responses"]["200"]["content"].values()
    assert answer["schema"] == {"$ref": "#/components/schemas/Answer"}


async def test_requests_are_counted_under_few_names(service: Service) -> None:
    await service.client.request("PROPFIND", "/health")
    await service.client.post("/api/executions/x/cancel", json={})
    await service.client.get("/health", headers={"host": "evil.example"})
    await service.client.get("/nowhere")
    text = (await service.client.get("/metrics")).text
    shown = {line.partition("{")[2] for line in text.splitlines() if line.startswith("noetl_http_requests")}
    assert shown == {
        'method="other",route="/health",status="405"} 1.0',
        'method="POST",route="/api/executions/{execution_id}/cancel",status="422"} 1.0',
        'method="GET",route="none",status="400"} 1.0',
        'method="GET",route="none",status="404"} 1.0',
    }
