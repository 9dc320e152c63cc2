"""Requests that a page of another site, a form, a redirect or a slow client may send to the HTTP API."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from noetl_dagster.service import connections
from noetl_dagster.settings import Settings
from tests.service.conftest import Service, serving

JSON = {"content-type": "application/json"}
CLIENT = {"x-noetl-client": "tests"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
TOKENS = SecretStr(json.dumps({"w": ["pool:default"], "r": ["reader"], "o": ["operator"]}))
EXECUTE, CANCEL, CLAIM, EVENTS = (
    "/api/executions/execute",
    "/api/executions/1/cancel",
    "/api/commands/claim",
    "/api/events/batch",
)
OTHER_SITE = "requests from pages of other sites are refused"

Serve = Callable[..., Service]
http = httpx.Client()


@pytest.fixture(scope="module")
def serve(module_settings: Settings) -> Iterator[Serve]:
    """Starts services on a loop of their own, since the tests block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    contexts = []

    def serve(**changes: Any) -> Service:
        contexts.append(serving(module_settings, **changes))
        return asyncio.run_coroutine_threadsafe(contexts[-1].__aenter__(), loop).result(60)

    yield serve
    for context in contexts:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="module")
def without_tokens(serve: Serve) -> Service:
    return serve()


@pytest.fixture(scope="module")
def with_tokens(serve: Serve) -> Service:
    return serve(service_tokens=TOKENS)


@pytest.fixture(scope="module")
def impatient(serve: Serve) -> Service:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEADER_SECONDS", 0.4)
        patch.setattr(connections, "BODY_SECONDS", 0.4)
        return serve(service_connections=20)


@pytest.mark.parametrize("path", [EXECUTE, CANCEL, CLAIM, EVENTS, "/api/catalog", "/api/workers"])
@pytest.mark.parametrize(
    ("headers", "status", "detail"),
    [
        (JSON | CLIENT | {"origin": "http://evil.example"}, 403, OTHER_SITE),
        (JSON | CLIENT | {"origin": "null"}, 403, OTHER_SITE),
        (JSON | CLIENT | {"origin": "http://127.0.0.1:1"}, 403, OTHER_SITE),
        (JSON | CLIENT | {"origin": "https://127.0.0.1.evil.example"}, 403, OTHER_SITE),
        (JSON | CLIENT | {"origin": ""}, 403, OTHER_SITE),
        (JSON | CLIENT | {"sec-fetch-site": "cross-site"}, 403, OTHER_SITE),
        (JSON | CLIENT | {"sec-fetch-site": "same-site"}, 403, OTHER_SITE),
        (JSON, 403, "the header X-NoETL-Client is needed"),
        (JSON | {"x-noetl-client": ""}, 403, "the header X-NoETL-Client is needed"),
        (FORM, 403, "the header X-NoETL-Client is needed"),
        (CLIENT, 415, "a body of JSON is needed"),
        (CLIENT | FORM, 415, "a body of JSON is needed"),
        (CLIENT | {"content-type": "text/plain"}, 415, "a body of JSON is needed"),
        (CLIENT | {"content-type": "multipart/form-data; boundary=x"}, 415, "a body of JSON is needed"),
        (CLIENT | {"content-type": "text/plain; application/json"}, 415, "a body of JSON is needed"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"{}"])
def test_changes_from_elsewhere_are_refused(
    without_tokens: Service, path: str, headers: dict[str, str], content: bytes, status: int, detail: str
) -> None:
    answer = http.post(without_tokens.url + path, headers=headers, content=content)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["detail"].startswith(detail)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/health", "/docs", EXECUTE, "//api/executions", "/nowhere"])
def test_no_method_and_path_is_left_out(without_tokens: Service, method: str, path: str) -> None:
    answer = http.request(method, without_tokens.url + path, headers=JSON | CLIENT | {"origin": "http://evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/executions", {}, 403),
        ("/api/executions", CLIENT, 200),
        ("/api/executions", CLIENT | {"sec-fetch-site": "cross-site"}, 403),
        ("/api/executions", CLIENT | {"origin": "http://evil.example"}, 403),
        ("/api/executions/1/events", {}, 403),
        ("/api/results/content?ref=x", {}, 403),
        ("/api/catalog/" + "9" * 5_000, CLIENT, 422),
        ("/api/catalog/" + "9" * 19, CLIENT, 422),
        ("/api/catalog/1", CLIENT, 404),
        ("/health", {}, 200),
        ("/ready", {}, 200),
        ("/metrics", {}, 200),
        ("/docs", {"sec-fetch-site": "cross-site"}, 200),  # a link
    ],
)
def test_reads(without_tokens: Service, path: str, headers: dict[str, str], status: int) -> None:
    assert http.get(without_tokens.url + path, headers=headers).status_code == status


@pytest.mark.parametrize("content", [b"", b"{}"])
def test_the_apis_own_page_may_send_requests(without_tokens: Service, content: bytes) -> None:
    own = JSON | CLIENT | {"origin": without_tokens.url, "sec-fetch-site": "same-origin"}
    assert http.post(without_tokens.url + CANCEL, headers=own, content=content).status_code == 404
    document = http.get(f"{without_tokens.url}/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    name = next(name for name, one in schemes.items() if one["type"] == "apiKey")
    assert schemes[name]["name"].lower() == "x-noetl-client"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ({name: []} in operation.get("security", [])) == path.startswith("/api/")


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"])
@pytest.mark.parametrize(("token", "status"), [(None, 401), ("x", 401), ("w", 403), ("r", 200), ("o", 200)])
def test_documents_need_a_reader(with_tokens: Service, path: str, token: str | None, status: int) -> None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    assert http.get(with_tokens.url + path, headers=headers).status_code == status


def test_wrong_tokens_share_the_limit_of_their_address(serve: Serve) -> None:
    url = f"{serve(service_tokens=TOKENS, service_rate=3).url}/api/executions"
    answers = [http.get(url, headers={"authorization": f"Bearer guess-{number}"}).status_code for number in range(10)]
    assert set(answers) == {401, 429}
    assert http.get(url, headers={"authorization": "Bearer r"}).status_code == 200


@pytest.mark.parametrize("path", [EXECUTE, EVENTS, "/api/catalog", "/nowhere"])
@pytest.mark.parametrize("authorization", ["", "authorization: Bearer x\r\n", "authorization: Basic bw==\r\n"])
def test_tokens_are_checked_before_the_body_arrives(with_tokens: Service, path: str, authorization: str) -> None:
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{authorization}content-length: 9\r\n"
    with closing(connected(with_tokens)) as sent:
        sent.sendall(lines.encode() + b"\r\n")
        assert received(sent, until=b"\r\n").startswith(b"HTTP/1.1 401")


HEAD = b"POST /api/events HTTP/1.1\r\nhost: 127.0.0.1\r\nx-noetl-client: x\r\ncontent-type: application/json\r\n"


SLOW = [
    (b"", b""),
    (b"GET /health HTTP/1.1\r\n", b"a: b\r\n"),
    (b"GET /hea", b""),
    (b"GET /health HTTP/1.1\r\na", b"a"),
    (HEAD + b"content-length: 1000000\r\n\r\n", b" "),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
    (HEAD + b"content-length: 1000000000\r\n\r\n", b" "),  # refused at once, and sent all the same
    (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /health HTTP/1.1\r\n", b"a: b\r\n"),
    (b"POST /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\n", b" "),
]
"""The beginning of a request, and the bytes that follow one by one."""


def test_slow_clients_are_dropped(impatient: Service) -> None:
    def seconds_until_dropped(case: tuple[bytes, bytes]) -> float:
        with closing(connected(impatient)) as sent:
            sent.sendall(case[0])
            began = time.monotonic()
            while time.monotonic() - began < 4:
                try:
                    sent.sendall(case[1])
                    sent.settimeout(0.05)
                    if not sent.recv(65536):
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            return time.monotonic() - began

    with ThreadPoolExecutor(len(SLOW)) as threads:
        took = list(threads.map(seconds_until_dropped, SLOW))
    assert [case for case, seconds in zip(SLOW, took, strict=True) if not 0.3 < seconds < 3] == []


@pytest.mark.parametrize(
    ("sent_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 90 + b"\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"b" * 60_000 + b"\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"b" * 70_000, b"431"),
        (b"GET /" + b"b" * 70_000, b"431"),
        (HEAD + b"content-length: 200000\r\n\r\n" + b" " * 200_000, b"422"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n" + b"0\r\n\r\n", b"422"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"b" * 200_000, b"431"),
    ],
)
def test_headers_are_bounded(impatient: Service, sent_bytes: bytes, status: bytes) -> None:
    with closing(connected(impatient)) as sent:
        middle = len(sent_bytes) // 2
        sent.sendall(sent_bytes[:middle])
        time.sleep(0.03)
        sent.sendall(sent_bytes[middle:])
        assert received(sent, until=b"\r\n").startswith(b"HTTP/1.1 " + status)


def test_connections_are_bounded(impatient: Service) -> None:
    held = [connected(impatient) for _ in range(22)]
    try:
        time.sleep(0.1)
        assert received(held[-1], until=b"\r\n").startswith(b"HTTP/1.1 503")
    finally:
        for one in held:
            one.close()
    time.sleep(0.1)
    assert http.get(f"{impatient.url}/health").status_code == 200


def test_a_client_that_takes_its_time_within_the_limits(impatient: Service) -> None:
    with closing(connected(impatient)) as sent:
        for _ in range(2):  # on one connection, with pauses
            for piece in (b"GET /hea", b"lth HTTP/1.1\r\nhost: 127.", b"0.0.1\r\n\r\n"):
                sent.sendall(piece)
                time.sleep(0.1)
            assert b"200 OK" in received(sent, until=b"}")
            time.sleep(0.45)


def connected(service: Service) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def received(sent: socket.socket, until: bytes) -> bytes:
    answer = b""
    while until not in answer and (block := sent.recv(65536)):
        answer += block
    return answer
