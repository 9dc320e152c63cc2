"""The http tool against a real server."""

from __future__ import annotations

import base64
import datetime as dt
import json
import sys
import zlib
from typing import Any
from urllib.parse import parse_qsl

import pytest

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError, ToolError
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.http.tool import retry_after_seconds


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
    ("code", "kind", "retryable"),
    [
        (400, "client_error", False),
        (401, "auth", False),
        (403, "auth", False),
        (404, "not_found", False),
        (408, "client_error", True),
        (425, "client_error", True),
        (429, "rate_limit", True),
        (503, "server_error", True),
    ],
)
async def test_status_from_400_on_is_an_error(run: Any, server: str, code: int, kind: str, retryable: bool) -> None:
    with pytest.raises(ToolError, match=f"answered {code}") as caught:
        await run("http", url=f"{server}/status/{code}?wait=7")

    error = caught.value
    assert (error.kind, error.status, error.retryable, error.retry_after) == (kind, code, retryable, 7.0)
    assert error.details["http"]["status"] == code
    assert error.details["http"]["headers"]["retry-after"] == "7"


def test_retry_after_understands_dates() -> None:
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (retry_after_seconds("Wed, 21 Oct 2099 07:28:00 GMT") or 0) > 1e9
    assert retry_after_seconds("soon") is None


async def test_a_timeout_that_is_no_number_is_an_error_of_the_playbook(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="http in step stage: timeout 'soon' is no number of seconds") as caught:
        await run("http", url=f"{server}/text", timeout="soon")
    assert (caught.value.kind, caught.value.retryable) == ("schema", False)


async def test_relative_url_needs_a_credential_with_a_base(
    run: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOETL_CREDENTIAL_RECORDS_API", json.dumps({"type": "http", "data": {"url": f"{server}/v1/"}}))

    assert (await run("http", url="/patients", auth="records_api")).data["data"]["path"] == "/v1/patients"
    with pytest.raises(ToolError, match="relative"):
        await run("http", url="/patients")


async def test_a_bearer_credential_needs_a_token(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="of type bearer has no 'token'"):
        await run("http", url=f"{server}/x", auth={"type": "bearer", "url": server})


async def test_header_credential_does_not_follow_to_another_origin(run: Any, server: str, other_server: str) -> None:
    auth = {"type": "header", "header": "X-Key", "value": "s3cr3t"}

    same = (await run("http", url=f"{server}/moved/307", params={"to": f"{server}/x"}, auth=auth)).data["data"]
    other = (await run("http", url=f"{server}/moved/307", params={"to": f"{other_server}/x"}, auth=auth)).data["data"]

    assert same["headers"]["x-key"] == "s3cr3t"
    assert "x-key" not in other["headers"]


async def test_credential_with_a_base_is_sent_nowhere_else(run: Any, server: str, other_server: str) -> None:
    auth = {"type": "bearer", "token": "s3cr3t", "url": server}

    with pytest.raises(ToolError, match="the credential is for"):
        await run("http", url=f"{other_server}/x", auth=auth)


async def test_no_redirects_when_not_wanted(run: Any, server: str) -> None:
    result = await run("http", url=f"{server}/moved/307", params={"to": "/x"}, follow_redirects=False)

    assert result.data["status_code"] == 307


async def test_secrets_do_not_show_in_errors(run: Any, server: str) -> None:
    auth = {"type": "header", "in": "query", "name": "key", "value": "s3cr3t-value"}

    with pytest.raises(ToolError) as caught:
        await run("http", url=f"{server.replace('//', '//user:pa55word@')}/status/500", auth=auth)

    assert "status/500?key=***" in error_envelope(caught.value)["error"]["message"]
    assert "pa55word" not in str(caught.value)


async def test_redirects_keep_or_change_the_method_as_the_status_says(run: Any, server: str) -> None:
    for code, method, body in ((303, "GET", ""), (302, "GET", ""), (301, "GET", ""), (308, "PUT", "text")):
        sent = "POST" if code == 301 else "PUT"
        url = f"{server}/moved/{code}"
        seen = (await run("http", url=url, params={"to": "/x?a=1"}, method=sent, json="text")).data["data"]

        assert (seen["method"], seen["body"], seen["query"]) == (method, body, {"a": "1"}), code


async def test_what_belongs_to_an_origin_stays_there(run: Any, server: str, other_server: str) -> None:
    SECRETS.hide("s3cr3t-of-keychain")
    given = {"Authorization": "Bearer mine", "X-Other": "1", "Accept": "s3cr3t-of-keychain", "Accept-Language": "de"}
    there = {"url": f"{server}/moved/307", "headers": given}

    same = (await run("http", params={"to": "/x"}, **there)).data["data"]["headers"]
    other = (await run("http", params={"to": f"{other_server}/x"}, **there)).data["data"]["headers"]

    assert (same["authorization"], same["cookie"], same["x-other"]) == ("Bearer mine", "seen=moved", "1")
    assert "authorization" not in other
    assert other["host"] in other_server
    assert "x-other" not in other
    assert "s3cr3t" not in str(other)
    assert other["accept-language"] == "de"
    fresh = (await run("http", url=f"{server}/x")).data["data"]["headers"]
    assert "cookie" not in fresh  # of another call, perhaps of another execution


async def test_secrets_do_not_show_as_they_travel(run: Any, server: str) -> None:
    auth = {"type": "header", "in": "query", "header_name": "key", "value": "ab+c/de==fgh"}

    found = (await run("http", url=f"{server}/x", auth=auth)).data

    assert found["data"]["query"] == {"key": "ab+c/de==fgh"}
    assert "ab%2Bc" not in found["url"]


async def test_redirects_end(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="more than 20 redirects") as caught:
        await run("http", url=f"{server}/forever")
    with pytest.raises(ToolError, match="redirects to ftp:, which is neither"):
        await run("http", url=f"{server}/moved/302", params={"to": "ftp://127.0.0.1/x"})

    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("path", "params", "sent"),
    [
        ("/a%2Fb/c%20d?x=%41&y", None, "/a%2Fb/c%20d?x=%41&y"),  # as it was written
        ("/ü x", None, "/%C3%BC%20x"),
        ("/x?a=1&b=2", {"b": [3, None], "c": "é &"}, "/x?a=1&b=3&c=%C3%A9+%26"),
        ("/x", {"none": None}, "/x"),
        ("/x#part", {"a": False}, "/x?a=false"),
    ],
)
async def test_addresses(run: Any, server: str, path: str, params: Any, sent: str) -> None:
    found = await run("http", url=f"{server}{path}", params=params)

    assert found.data["url"] == f"{server}{sent}"


@pytest.mark.parametrize("url", ["http://", "ftp://127.0.0.1/x", "http://127.0.0.1:port/", "http://[::1"])
async def test_what_is_no_address_is_not_tried_again(run: Any, url: str) -> None:
    with pytest.raises(ToolError, match="GET") as caught:
        await run("http", url=url)

    assert not caught.value.retryable


async def test_a_header_cannot_hold_another_one(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="cannot be sent"):
        await run("http", url=f"{server}/x", headers={"X-A": "1\r\nX-B: 2"})


async def test_repeated_headers_and_charsets(run: Any, server: str) -> None:
    found = (await run("http", url=f"{server}/twice", params={"charset": "latin-1"})).data

    assert found["headers"]["x-part"] == "one, two"
    assert found["data"] == "ä"


SPELLED = {
    "yes": (True, "true"),
    "none": (None, None),
    "whole": (3, "3"),
    "half": (0.5, "0.5"),
    "zip": ("00123", "00123"),
    "day": (dt.date(2026, 1, 2), "2026-01-02"),
    "map": ({"a": [1, True, None]}, '{"a":[1,true,null]}'),
}
"""Names with a value, and the text that is sent; None if nothing is sent."""


async def test_a_value_has_one_spelling(run: Any, server: str) -> None:
    values = {name: value for name, (value, _) in SPELLED.items()}
    spelled = {name: text for name, (_, text) in SPELLED.items() if text is not None}
    plain = {name: value for name, value in values.items() if name != "map"}

    sent = (await run("http", url=f"{server}/x", method="post", params=values, form=values, headers=plain)).data["data"]
    script = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n in NAMES}))"
    command = f"{sys.executable} -c '{script.replace('NAMES', json.dumps(list(SPELLED)))}'"
    shell = await run("shell", cmds=command, env={**values, "none": None})

    assert sent["query"] == spelled
    assert dict(parse_qsl(sent["body"])) == spelled
    assert {name: sent["headers"].get(name) for name in plain} == {name: spelled.get(name) for name in plain}
    assert json.loads(shell.data["stdout"]) == spelled
    lists = (await run("http", url=f"{server}/x", params={"a": [], "b": [True, None, {"c": 1}]})).data["url"]
    assert lists == f"{server}/x?b=true&b=%7B%22c%22%3A1%7D"
    with pytest.raises(ToolError, match=r"cannot be sent: headers\.X-A is a list, and a header is one text"):
        await run("http", url=f"{server}/x", headers={"X-A": [1]})


DIGITS = '{"rows": [{"n": 1234567890123456.7891}]}'
JSON_TYPE = "application/json"


@pytest.mark.parametrize(
    ("body", "type_", "more", "value"),
    [
        ('{"a": "é"}'.encode("utf-8-sig"), JSON_TYPE, {}, {"a": "é"}),
        ('{"a": "é"}'.encode("utf-16"), JSON_TYPE, {}, {"a": "é"}),
        ('{"a": "é"}'.encode("utf-16-le"), f"{JSON_TYPE}; charset=utf-16le", {}, {"a": "é"}),
        ('{"a": "é"}'.encode("latin-1"), f"{JSON_TYPE}; charset=latin-1", {}, {"a": "é"}),
        ('{"a": "é"}'.encode("latin-1"), JSON_TYPE, {"charset": "latin-1"}, {"a": "é"}),
        (DIGITS.encode(), JSON_TYPE, {"numbers": "text"}, {"rows": [{"n": "1234567890123456.7891"}]}),
        (DIGITS.encode(), JSON_TYPE, {"numbers": "float"}, {"rows": [{"n": 1234567890123456.8}]}),
        (b'{"a": 1, "a": 2}', JSON_TYPE, {}, {"a": 2}),
        (b" \n", JSON_TYPE, {}, None),
        (b"<html>", JSON_TYPE, {"format": "text"}, "<html>"),
        (b'{"a": 1}\n{"a": 2}\n', JSON_TYPE, {"format": "jsonl"}, [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\n', "application/x-ndjson", {}, '{"a": 1}\n'),
        (b'a,b\n,""\n', "text/csv", {"format": "csv"}, [{"a": None, "b": None}]),
        ("a\né\n".encode("latin-1"), "text/csv", {"format": "csv", "charset": "latin-1"}, [{"a": "é"}]),
        ("é".encode("utf-16"), "text/plain", {}, "é"),
        ("é".encode("latin-1"), "text/plain", {"charset": "latin-1"}, "é"),
    ],
)
async def test_a_body_is_what_its_type_and_first_bytes_say(
    run: Any, server: str, body: bytes, type_: str, more: dict[str, str], value: Any
) -> None:
    result = await run("http", url=f"{server}/same", method="post", params={"type": type_}, json=body, **more)
    assert result.data["data"] == value


@pytest.mark.parametrize(
    ("body", "type_", "more", "message"),
    [
        (b"<html>", JSON_TYPE, {}, "not JSON, as its type says .*'<html>'; write format: text"),
        (b'{"a": 1}\n{"a": 2}\n', JSON_TYPE, {}, "each of its lines is: write format: jsonl"),
        (DIGITS.encode(), JSON_TYPE, {}, r"rows\[0\].n is 1234567890123456.7891, which neither .* write numbers: text"),
        (b'{"a": 1e400}', JSON_TYPE, {}, "a is 1e400"),
        (b'{"a": 1}\n{"a": 1e-400}\n', JSON_TYPE, {"format": "jsonl"}, r"line 2: value\.a is 1e-400"),
        (
            b"[1, 123456789012345678901234567890]",
            JSON_TYPE,
            {"format": "json"},
            r"\[1\] is 123456789012345678901234567890",
        ),
        ('{"a": "é"}'.encode("latin-1"), JSON_TYPE, {}, "no text in utf-8"),
        (
            "é".encode("latin-1"),
            "text/plain",
            {},
            "no text in utf-8 .* in position 0: .*; write the encoding .* charset: latin-1",
        ),
        (b"a", "text/plain; charset=no-such", {}, "unknown encoding: no-such.*charset: latin-1"),
        (b"a\n", "text/csv; charset=no-such", {"format": "csv"}, "unknown encoding: no-such"),
        ("a\n".encode("utf-16"), "text/csv; charset=utf-16", {"format": "csv"}, "rows in utf-16 cannot be cut"),
    ],
)
async def test_a_body_that_is_not_what_its_type_says_fails(
    run: Any, server: str, body: bytes, type_: str, more: dict[str, str], message: str
) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        await run("http", url=f"{server}/same", method="post", params={"type": type_}, json=body, **more)
    assert (caught.value.kind, caught.value.retryable) == ("parse", False)


COMPRESSORS = {"gzip": 31, "deflate": 15, "raw": -15}


@pytest.mark.parametrize("window", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize(("limit", "more"), [(5_000_000, {}), (5_000, {}), (5_000_000, {"format": "json"})])
async def test_a_compressed_body_that_was_cut_is_no_result(
    run: Any, box: ToolContext, server: str, window: int, limit: int, more: dict[str, str]
) -> None:
    box.settings = box.settings.model_copy(update={"http_body_bytes": limit})
    packer = zlib.compressobj(wbits=window)
    body = packer.compress(json.dumps([{"n": n} for n in range(5_000)]).encode()) + packer.flush()
    asked = {"url": f"{server}/same", "method": "post", **more}
    asked["params"] = {"encoding": "gzip" if window == COMPRESSORS["gzip"] else "deflate"}

    whole = (await run("http", json=body, **asked)).data
    assert "encoding" in whole or whole["data"][-1] == {"n": 4_999}
    for cut in (body[:-1], body[: len(body) // 2], body[:3]):
        with pytest.raises(ToolError, match="its body was cut or damaged") as caught:
            await run("http", json=cut, **asked)
        assert (caught.value.kind, caught.value.retryable) == ("connection", True)
    with pytest.raises(ReferenceNotAvailableError):
        await box.results.find((7001, "stage", "task_0-body"))


async def test_a_compression_that_is_not_read_is_named(run: Any, server: str) -> None:
    with pytest.raises(ToolError, match="Content-Encoding br is not supported; send the header Accept-Encoding: gzip"):
        await run("http", url=f"{server}/same", method="post", params={"encoding": "br"}, json=b"x")


async def test_the_address_names_the_user_unless_a_credential_does(run: Any, server: str) -> None:
    url = server.replace("//", "//u:p@") + "/x"

    by_address = (await run("http", url=url)).data
    by_credential = (await run("http", url=url, auth={"type": "bearer", "token": "s3cr3t"})).data

    assert by_address["data"]["headers"]["authorization"] == "Basic dTpw"
    assert by_credential["data"]["headers"]["authorization"] == "Bearer s3cr3t"
    assert "u:p@" not in by_address["url"] + by_credential["url"]


async def test_large_bodies_are_stored_as_they_come(run: Any, box: ToolContext, server: str) -> None:
    box.settings = box.settings.model_copy(update={"http_body_bytes": 5_000})

    small = (await run("http", url=f"{server}/large", params={"size": 5_000})).data
    over = (await run("http", url=f"{server}/large", params={"size": 5_001})).data  # arrives whole
    found = (await run("http", url=f"{server}/large", params={"size": 3_000_000})).data

    assert (len(small["data"]), "encoding" in small) == (5_000, False)
    assert (over["data"]["bytes_size"], over["encoding"]) == (5_001, "reference")
    assert found["encoding"] == "reference"
    ref = ResultRef.model_validate(found["data"])
    assert (ref.content_type, ref.bytes_size) == ("text/csv", 3_000_000)
    assert await box.results.get(ref) == "x" * 3_000_000
    assert await box.results.find(ref.ref) == ref
    box.settings = box.settings.model_copy(update={"chunk_bytes": 256 << 10})
    body = {"n": 1, "text": "x" * 2_000_000}
    parsed = (await run("http", url=f"{server}/same", method="post", json=body)).data
    assert await box.results.get(ResultRef.model_validate(parsed["data"])) == body
    inexact = json.dumps(body).replace("1", "1234567890123456.7891").encode()
    parsed = (await run("http", url=f"{server}/same", method="post", json=inexact)).data
    with pytest.raises(StorageError, match=r"value\.n is 1234567890123456\.7891, which neither"):
        await box.results.get(ResultRef.model_validate(parsed["data"]))
    taken = await run("artifact", action="get", ref=found["data"])
    assert taken.ref is not None
    assert taken.ref.ref == ref.ref


async def test_a_body_that_breaks_off_is_no_result(run: Any, box: ToolContext, server: str) -> None:
    for limit, size in ((5_000_000, 20_000), (5_000, 20_000)):
        box.settings = box.settings.model_copy(update={"http_body_bytes": limit})
        with pytest.raises(ToolError, match="failed") as caught:
            await run("http", url=f"{server}/large", params={"size": size, "cut": 1})
        assert caught.value.retryable

    with pytest.raises(ReferenceNotAvailableError):
        await box.results.find((7001, "stage", "task_0-body"))


async def test_a_large_refusal_is_cut(run: Any, box: ToolContext, server: str) -> None:
    box.settings = box.settings.model_copy(update={"http_body_bytes": 1_024})

    with pytest.raises(ToolError, match="answered 400") as caught:
        await run("http", url=f"{server}/status/400?pad={'x' * 4_000}")

    assert len(caught.value.details["http"]["body"]) <= 300
