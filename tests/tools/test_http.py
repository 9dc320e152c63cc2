"""The http tool against a real server."""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.http import retry_after_seconds


async def test_result_has_the_documented_shape(run: Any, server: str) -> None:
    result = await run("http", url=f"{server}/users", params={"page": 2, "tag": None, "on": True})

    assert result.data.keys() == {"status_code", "headers", "url", "elapsed", "data"}
    assert result.data["status_code"] == 200
    assert result.data["data"]["query"] == {"page": "2", "on": "true"}
    assert result.data["url"] == f"{server}/users?page=2&on=true"
    assert result.details["http"]["status"] == 200
    assert result.details["http"]["headers"]["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "sent", "content_type"),
    [
        ({"json": {"a": [1, None]}}, '{"a":[1,null]}', "application/json"),
        ({"json": "raw text"}, "raw text", None),
        ({"form": {"a": "1 2"}}, "a=1+2", "application/x-www-form-urlencoded"),
    ],
)
async def test_bodies(run: Any, server: str, body: Any, sent: str, content_type: str | None) -> None:
    seen = (await run("http", url=f"{server}/x", method="post", **body)).data["data"]

    assert seen["method"] == "POST"
    assert seen["body"] == sent
    assert seen["headers"].get("content-type") == content_type


async def test_text_and_binary_bodies(run: Any, server: str) -> None:
    assert (await run("http", url=f"{server}/text")).data["data"] == "héllo"

    binary = (await run("http", url=f"{server}/binary")).data
    assert base64.b64decode(binary["data"]) == b"\x00\xff\x01"
    assert binary["encoding"] == "base64"


@pytest.mark.parametrize(
    ("code", "retryable"), [(400, False), (404, False), (408, True), (425, True), (429, True), (503, True)]
)
async def test_status_from_400_on_is_an_error(run: Any, server: str, code: int, retryable: bool) -> None:
    with pytest.raises(ToolError, match=f"answered {code}") as caught:
        await run("http", url=f"{server}/status/{code}?wait=7")

    error = caught.value
    assert (error.kind, error.status, error.retryable, error.retry_after) == ("http", code, retryable, 7.0)
    assert error.details["http"]["status"] == code
    assert error.details["http"]["headers"]["retry-after"] == "7"


def test_retry_after_understands_dates() -> None:
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (retry_after_seconds("Wed, 21 Oct 2099 07:28:00 GMT") or 0) > 1e9
    assert retry_after_seconds("soon") is None


async def test_time_out_and_refused_connection_are_retryable(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="timed out") as late:
        await run("http", url=f"{server}/slow", timeout=0.1)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{sock.getsockname()[1]}/"
        with pytest.raises(ToolError, match="failed") as refused:
            await run("http", url=closed)

    assert late.value.retryable
    assert refused.value.retryable


async def test_relative_url_needs_a_credential_with_a_base(
    run: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "NOETL_CREDENTIAL_RECORDS_API", json.dumps({"type": "http", "data": {"url": f"{server}/v1/"}})
    )

    assert (await run("http", url="/patients", auth="records_api")).data["data"]["path"] == "/v1/patients"
    with pytest.raises(ToolError, match="relative"):
        await run("http", url="/patients")


@pytest.mark.parametrize(
    ("auth", "header", "value"),
    [
        ({"type": "bearer", "token": "s3cr3t"}, "authorization", "Bearer s3cr3t"),
        ({"type": "basic", "username": "u", "password": "p"}, "authorization", "Basic dTpw"),
        ({"type": "header", "header": "X-Key", "value": "s3cr3t"}, "x-key", "s3cr3t"),
    ],
)
async def test_authentication(run: Any, server: str, auth: Any, header: str, value: str) -> None:
    seen = (await run("http", url=f"{server}/x", auth=auth)).data["data"]

    assert seen["headers"][header] == value


async def test_header_credential_does_not_follow_to_another_origin(
    run: Any, server: str, other_server: str
) -> None:
    auth = {"type": "header", "header": "X-Key", "value": "s3cr3t"}

    same = (await run("http", url=f"{server}/away", params={"to": f"{server}/x"}, auth=auth)).data["data"]
    other = (await run("http", url=f"{server}/away", params={"to": f"{other_server}/x"}, auth=auth)).data[
        "data"
    ]

    assert same["headers"]["x-key"] == "s3cr3t"
    assert "x-key" not in other["headers"]


async def test_credential_with_a_base_is_sent_nowhere_else(run: Any, server: str, other_server: str) -> None:
    auth = {"type": "bearer", "token": "s3cr3t", "url": server}

    with pytest.raises(ToolError, match="the credential is for"):
        await run("http", url=f"{other_server}/x", auth=auth)


async def test_no_redirects_when_not_wanted(run: Any, server: str) -> None:
    result = await run("http", url=f"{server}/away", params={"to": "/x"}, follow_redirects=False)

    assert result.data["status_code"] == 307


async def test_secrets_do_not_show_in_errors(run: Any, server: str) -> None:
    auth = {"type": "header", "in": "query", "name": "key", "value": "s3cr3t-value"}

    with pytest.raises(ToolError) as caught:
        await run("http", url=f"{server.replace('//', '//user:pa55word@')}/status/500", auth=auth)

    assert "s3cr3t-value" not in str(caught.value)
    assert "pa55word" not in str(caught.value)
