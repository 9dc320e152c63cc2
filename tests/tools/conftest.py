"""A toolbox over the embedded services, and a real HTTP server with known faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from noetl_dagster.playbook.models import Task, TaskSpec
from noetl_dagster.settings import Settings
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.chunks import files
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.tools.rows import reader
from tests.serving import served
from tests.tools.chunk_log import NoLog

Run = Callable[..., Any]


@pytest.fixture
def log() -> NoLog:
    return NoLog()


@pytest.fixture
async def box(settings: Settings, pool: asyncpg.Pool, tmp_path: Path, log: NoLog) -> AsyncIterator[ToolContext]:
    own = settings.model_copy(
        update={
            "default_postgres_credential": "embedded",
            "secrets_path": tmp_path,
        }
    )
    clients = Clients(own)

    def no_spark() -> Any:
        raise AssertionError("these tests start no Spark")

    async with ResultStore(own, pool) as results:
        yield log.toolbox(own, results, Credentials(own, pool, clients), clients, no_spark)
    await clients.close()


@pytest.fixture
def small_chunks(box: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 KiB, and files that are read in smaller blocks."""
    box.settings = box.settings.model_copy(update={"chunk_bytes": 256 << 10})
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(files, "_BATCH_ROWS", 100)


@pytest.fixture
def run(box: ToolContext, tmp_path: Path, log: NoLog) -> Run:
    """Runs a command of one call: ``await run("http", url=...)``; ``input``, ``auth``, ``scope`` beside its config."""
    numbers = itertools.count()

    async def run_tool(
        kind: str,
        *,
        input: dict[str, Any] | None = None,
        auth: Any = None,
        scope: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        task: Task | None = None,
        folder: str = ".",
        **config: Any,
    ) -> ToolResult:
        spec = TaskSpec(options=options or {})
        call = ToolCall(
            execution_id=7001,
            step="stage",
            task=task or Task(name="task_0", kind=kind, config=config, spec=spec),
            config=config,
            input=input or {},
            auth=auth,
            scope=scope or {},
            folder=str(tmp_path / folder),
            command_id=f"7001:stage:1:{next(numbers)}:1",
        )
        try:
            return await tool_for(kind).run(call, box)
        finally:
            await asyncio.shield(log.end())

    return run_tool


async def echo(request: Request) -> Response:
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "query": dict(request.query_params),
            "headers": dict(request.headers),
            "body": (await request.body()).decode(),
        }
    )


async def same(request: Request) -> Response:
    """The body that was sent, as the ``type`` and in the ``encoding`` that are asked for."""
    asked = request.query_params
    headers = {"Content-Type": asked.get("type", "application/json")}
    headers |= {"Content-Encoding": asked["encoding"]} if "encoding" in asked else {}
    return Response(await request.body(), headers=headers)


async def status(request: Request) -> Response:
    code = request.path_params["code"]
    headers = {"Retry-After": request.query_params["wait"]} if "wait" in request.query_params else {}
    return JSONResponse({"problem": "as asked"}, status_code=code, headers=headers)


async def slow(request: Request) -> Response:
    """Never answers while the client has patience."""
    while not await request.is_disconnected():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return PlainTextResponse("late")


async def binary(request: Request) -> Response:
    return Response(b"\x00\xff\x01", media_type="application/octet-stream")


async def text(request: Request) -> Response:
    return PlainTextResponse("héllo")


async def given(request: Request) -> Response:
    """``body`` as it is asked for, as ``type``."""
    return Response(request.query_params["body"], media_type=request.query_params["type"])


async def moved(request: Request) -> Response:
    """Leads to ``to`` with the status that is asked for, and sets a cookie."""
    answer = Response(status_code=request.path_params["code"], headers={"Location": request.query_params["to"]})
    answer.set_cookie("seen", "moved")
    return answer


async def forever(request: Request) -> Response:
    return RedirectResponse("/forever")


async def large(request: Request) -> Response:
    """``size`` bytes in chunks without a length; with ``cut`` the connection ends half way."""
    size, cut = int(request.query_params["size"]), "cut" in request.query_params

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, size // 2 if cut else size, 1000):
            yield b"x" * min(1000, size - start)
        if cut:
            raise ConnectionResetError("as asked")

    return StreamingResponse(chunks(), media_type="text/csv")


async def rows(request: Request) -> Response:
    """``count`` rows of some 1 KB as CSV, JSON lines or a JSON array; with ``ranges`` a part of them may be asked for.

    ``cut`` ends the connection after so many bytes; ``end`` is that of an array; ``tag`` says what version it is. The
    header ``X-Sent`` says where the answer begins.
    """
    asked = request.query_params
    text = "x" * 1000
    if asked.get("as") == "csv":
        body = "id,text\r\n" + "".join(f'{n},"{text}\r\n""{n}"""\r\n' for n in range(int(asked["count"])))
    elif asked.get("as") == "json":
        lines = ",\n".join(f'{{"id": {n}, "text": "{text}"}}' for n in range(int(asked["count"])))
        body = f"[{lines}{asked.get('end', ']')}"
    else:
        body = "".join(f'{{"id": {n}, "text": "{text}"}}\n' for n in range(int(asked["count"])))
    content, tag, headers = body.encode(), f'"{asked.get("tag", "1")}"', {}
    start, status = 0, 200
    if "ranges" in asked:
        headers |= {"Accept-Ranges": "bytes", "ETag": tag}
        if "range" in request.headers and request.headers["if-range"] == tag:
            start, status = int(request.headers["range"].removeprefix("bytes=").removesuffix("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    stop = start + int(asked["cut"]) if "cut" in asked else len(content)

    async def chunks() -> AsyncIterator[bytes]:
        for place in range(start, stop, 50_000):
            yield content[place : min(place + 50_000, stop)]
        if "cut" in asked:
            raise ConnectionResetError("as asked")

    kinds = {"csv": "text/csv", "json": "application/json"}
    kind = kinds.get(asked.get("as", ""), "application/x-ndjson")
    return StreamingResponse(chunks(), status, headers | {"X-Sent": str(start)}, media_type=kind)


async def twice(request: Request) -> Response:
    answer = Response(b"\xe4", headers={"Content-Type": f"text/plain; charset={request.query_params['charset']}"})
    answer.headers.append("X-Part", "one")
    answer.headers.append("X-Part", "two")
    return answer


def application() -> Starlette:
    anything = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    return Starlette(
        routes=[
            Route("/status/{code:int}", status),
            Route("/slow", slow),
            Route("/binary", binary),
            Route("/text", text),
            Route("/as", given),
            Route("/moved/{code:int}", moved, methods=anything),
            Route("/forever", forever),
            Route("/large", large),
            Route("/rows", rows),
            Route("/same", same, methods=["POST"]),
            Route("/twice", twice),
            Route("/{path:path}", echo, methods=anything),
        ]
    )


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with served(application()) as url:
        yield url


@pytest.fixture(scope="session")
def other_server() -> Iterator[str]:
    with served(application()) as url:
        yield url
