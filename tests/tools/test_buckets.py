"""Kinds s3 and gcs, against the embedded object store and Google's emulator."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.oauth2 import service_account

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.models import Task
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.tiers.gcs import GcsBucket, gcs_client
from noetl_dagster.storage.tiers.objects import S3Bucket, minio_store
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.buckets import operations
from tests.tiers import google
from tests.tools.access.token_server import private_pem
from tests.tools.conftest import Run

__all__ = ["google"]


@dataclass
class Place:
    """A bucket of a kind, as the tool and as the tests see it."""

    kind: str
    run: Run
    objects: Any
    name: str
    folder: Path

    @property
    def root(self) -> str:
        return f"{'gs' if self.kind == 'gcs' else 's3'}://{self.name}/"

    async def __call__(self, operation: str, **config: Any) -> Any:
        return (await self.run(self.kind, operation=operation, **config)).data

    async def fails(self, operation: str, **config: Any) -> ToolError:
        with pytest.raises(ToolError) as caught:
            await self(operation, **config)
        return caught.value

    def store(self, key: str, data: bytes) -> None:
        self.objects.write(key, io.BytesIO(data), len(data))


@pytest.fixture(params=["s3", "gcs"])
async def bucket(
    request: pytest.FixtureRequest, run: Run, box: ToolContext, settings: Settings, google: Any, tmp_path: Path
) -> AsyncIterator[Place]:
    if request.param == "s3":
        store = minio_store(settings)
        await box.results.ready(StoreTier.MINIO)
        yield Place("s3", run, S3Bucket(store), settings.minio_bucket, tmp_path)
        return
    name = settings.minio_bucket
    own = settings.model_copy(update={"gcs_endpoint": google.url, "gcs_bucket": name})
    gcs_client(own).create_bucket(name)
    box.settings = box.settings.model_copy(update={"gcs_endpoint": google.url, "gcs_bucket": name})
    yield Place("gcs", run, GcsBucket(own, name), name, tmp_path)


async def test_a_file_there_and_back(bucket: Place) -> None:
    (bucket.folder / "report.txt").write_text("all is well")
    put = await bucket("upload", source="report.txt", destination=f"{bucket.root}out/a.txt", content_type="text/plain")
    assert put == {
        "uri": f"{bucket.root}out/a.txt",
        "bucket": bucket.name,
        "key": "out/a.txt",
        "bytes": 11,
        "etag": bucket.objects.find("out/a.txt").etag,
    }
    got = await bucket("download", source=f"{bucket.root}out/a.txt", destination="back/b.txt")
    assert got == {**put, "path": str(bucket.folder / "back" / "b.txt")}
    assert (bucket.folder / "back" / "b.txt").read_text() == "all is well"
    assert await bucket("upload", file="report.txt", key="out/") == {
        **put,
        "uri": f"{bucket.root}out/report.txt",
        "key": "out/report.txt",
    }
    into = await bucket("get", uri=f"{bucket.root}out/report.txt", file="back/")
    assert into["path"] == str(bucket.folder / "back" / "report.txt")


async def test_a_large_file_is_sent_in_parts(bucket: Place) -> None:
    data = bytes(range(256)) * (68 << 10)  # 17 MiB
    (bucket.folder / "large.bin").write_bytes(data)
    put = await bucket("upload", source="large.bin", key="large.bin")
    again = await bucket("upload", source="large.bin", key="large.bin")
    assert (put["bytes"], again["etag"]) == (len(data), put["etag"])
    await bucket("download", key="large.bin", file="copy.bin")
    assert (bucket.folder / "copy.bin").read_bytes() == data


CONTENTS = {
    "a.txt": ({"content": "Grüße"}, "Grüße"),
    "a.json": ({"content": {"a": [1, None]}}, {"a": [1, None]}),
    "list.json": ({"content": [{"n": 1}, {"n": 2}]}, [{"n": 1}, {"n": 2}]),
    "rows.jsonl": ({"content": [{"n": 1}, {"n": 2}]}, [{"n": 1}, {"n": 2}]),
    "rows.csv": ({"content": {"rows": [{"n": 1, "t": "x"}]}}, [{"n": "1", "t": "x"}]),
    "plain.csv": ({"content": "n,t\n1,x\n"}, [{"n": "1", "t": "x"}]),
    "bytes.bin": ({"content": "AP8=", "encoding": "base64"}, b"\x00\xff"),
    "number": ({"content": 5}, "5"),
}


async def test_contents(bucket: Place) -> None:
    for key, (config, expected) in CONTENTS.items():
        await bucket("upload", key=key, **config)
        assert await bucket("download", key=key) == expected, key


async def test_formats(bucket: Place) -> None:
    await bucket("upload", key="rows", format="parquet", content=[{"n": 1}, {"n": 2}])
    table = await bucket("download", key="rows", format="parquet")
    assert table.to_pylist() == [{"n": 1}, {"n": 2}]
    await bucket("upload", key="rows.csv", content=[{"n": 1}])
    assert await bucket("download", key="rows.csv", format="text") == "n\r\n1\r\n"
    assert await bucket("download", key="rows.csv", format="base64") == "bg0KMQ0K"
    assert (await bucket.fails("download", key="rows", format="text")).kind == "parse"
    bucket.store("broken.json", b"{")
    assert (await bucket.fails("download", key="broken.json")).kind == "parse"


async def test_stored_results_are_uploaded_in_batches(bucket: Place, box: ToolContext) -> None:
    box.settings = box.settings.model_copy(update={"chunk_bytes": 1_000})
    table = pa.table({"n": list(range(1_000))})
    ref = await box.results.put(table, execution_id=7001, step="stage", name="numbers")
    for content in (ref, ref.ref, ref.model_dump(mode="json")):
        await bucket("upload", key="n.parquet", content=content)
        back = pq.read_table(pa.BufferReader(bucket.objects.read("n.parquet")))
        assert back.column("n").to_pylist() == list(range(1_000))
    got = await bucket.run(bucket.kind, operation="download", key="n.parquet")
    assert [row["n"] async for row in box.results.items(got.ref)] == list(range(1_000))  # in chunks


async def test_listing(bucket: Place) -> None:
    for key in ("a/1", "a/2/3", "ab", "b"):
        bucket.store(key, b"x")
    found = await bucket("list", prefix="a")
    assert {name: found[name] for name in ("bucket", "prefix", "count", "more")} == {
        "bucket": bucket.name,
        "prefix": "a",
        "count": 3,
        "more": False,
    }
    assert {row["key"]: row["uri"] for row in found["rows"]} == {
        key: bucket.root + key for key in ("a/1", "a/2/3", "ab")
    }
    first = found["rows"][0]
    assert (first["bytes"], bool(first["etag"]), first["modified"][4]) == (1, True, "-")
    some = await bucket("list", prefix=f"{bucket.root}a/", limit=1)
    assert (some["count"], len(some["rows"]), some["more"]) == (1, 1, True)
    assert (await bucket("list", prefix="a/", limit=2))["more"] is False
    nothing = await bucket("list", prefix="none/")
    assert (nothing["rows"], nothing["count"]) == ([], 0)


async def test_long_listings_are_chunks(bucket: Place, box: ToolContext) -> None:
    for number in range(20):
        bucket.store(f"many/{number:02}", b"x")
    box.settings = box.settings.model_copy(update={"chunk_bytes": 300})
    result = await bucket.run(bucket.kind, operation="list", prefix="many/")
    whole = await box.results.get(result.ref)
    assert (whole["count"], len(whole["rows"])) == (20, 20)


async def test_deleting(bucket: Place) -> None:
    for key in ("a/1", "a/2", "a/3", "a/4", "ab", "b"):
        bucket.store(key, b"x")
    assert await bucket("delete", uri=f"{bucket.root}a/1") == {"bucket": bucket.name, "deleted": 1}
    assert (await bucket("delete", key="a/1"))["deleted"] == 1  # a repetition is no error
    assert (await bucket("delete", key=["a/2", f"{bucket.root}a/3"]))["deleted"] == 2
    assert (await bucket("delete", prefix="a/"))["deleted"] == 1
    assert {found.key for page in bucket.objects.objects("") for found in page} == {"ab", "b"}
    assert not any(bucket.objects.objects("a/"))


REFUSED = {
    "an unknown operation": ("rename", {"key": "a"}, "operation 'rename' is unknown; known: upload, download"),
    "no object": ("download", {}, "download needs the object's key"),
    "a folder": ("download", {"key": "a/"}, "download needs the object's key"),
    "no content": ("upload", {"key": "a"}, "upload needs either a local file"),
    "two contents": ("upload", {"key": "a", "content": "x", "file": "y"}, "upload needs either a local file"),
    "no key": ("upload", {"content": "x"}, "upload needs the object's key"),
    "two objects": ("download", {"key": "a", "source": "b"}, "'key' and 'source' both name the object"),
    "another store": ("download", {"uri": "http://x/y"}, "is not of kind"),
    "a file": ("download", {"uri": "file:///x"}, "is a file of this machine"),
    "a copy": ("upload", {"source": "ROOTa", "destination": "ROOTb"}, "move rows with kind transfer"),
    "another bucket": ("download", {"uri": "ROOTa", "bucket": "other"}, "is in bucket"),
    "a bucket's name": ("download", {"key": "a", "bucket": "x?y"}, "is no name of a bucket"),
    "no keys": ("delete", {}, "a 'prefix' that is not empty"),
    "the whole bucket": ("delete", {"prefix": ""}, "a 'prefix' that is not empty"),
    "keys and a prefix": ("delete", {"key": "a", "prefix": "b"}, "a 'prefix' that is not empty"),
    "an empty key among others": ("delete", {"key": ["a", ""]}, "each of the list is a key"),
    "a limit": ("list", {"limit": "many"}, "limit 'many' is no number"),
    "a format": ("download", {"key": "a", "format": "xml"}, "format 'xml' is unknown"),
    "a prefix elsewhere": ("list", {"prefix": "http://x/"}, "is not in bucket"),
    "metadata": ("upload", {"key": "a", "content": "x", "metadata": "m"}, "metadata is a mapping"),
}


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
async def test_refusals(bucket: Place) -> None:
    for case, (operation, config, text) in REFUSED.items():
        filled = {
            name: value.replace("ROOT", bucket.root) if isinstance(value, str) else value
            for name, value in config.items()
        }
        error = await bucket.fails(operation, **filled)
        assert text in str(error), case
        assert error.kind == "schema", case


async def test_what_is_missing(bucket: Place) -> None:
    for operation, config in (
        ("download", {"key": "none"}),
        ("download", {"key": "none", "file": "x"}),
        ("download", {"key": "none.csv"}),
        ("upload", {"file": "none", "key": "a"}),
        ("download", {"key": "a", "bucket": f"{bucket.name}-none"}),
        ("list", {"bucket": f"{bucket.name}-none"}),
    ):
        error = await bucket.fails(operation, **config)
        assert (error.kind, error.retryable) == ("not_found", False), (operation, config, error)
    assert not (bucket.folder / "x").exists()


async def test_data_leads_out_of_no_folder(bucket: Place, box: ToolContext) -> None:
    bucket.store("a", b"x")
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("upload", {"file": "in/{{ n }}", "key": "a"}, {"file": "in/../../etc"}),
        ("upload", {"file": "{{ n }}", "key": "a"}, {"file": "/etc/passwd"}),
        ("download", {"key": "a", "destination": "{{ n }}"}, {"destination": "/none/of/the/folders"}),
        ("upload", {"file": "{{ n }}", "key": "a"}, {"file": "file://../../etc/passwd"}),
        ("download", {"key": "a", "file": "{{ n }}"}, {"file": "a?b/../../x"}),
        ("download", {"key": "a", "file": "{{ n }}"}, {"file": "a#b/../../x"}),
        ("download", {"key": "a", "file": "{{ n }}"}, {"file": "x:../../x"}),
        ("download", {"uri": "{{ n }}"}, {"uri": f"{bucket.root}x/../a"}),
        ("upload", {"content": "x", "key": "out/{{ n }}"}, {"key": "out/../a"}),
        ("delete", {"prefix": "out/{{ n }}"}, {"prefix": "out/../a"}),
        ("delete", {"key": "{{ n }}"}, {"key": ["out/../a"]}),
    )
    for operation, written, rendered in cases:
        task = Task(name="t", kind=bucket.kind, config={"operation": operation, **written})
        error = await bucket.fails(operation, task=task, **{**written, **rendered})
        assert error.kind == "schema", (written, error)
    assert bucket.objects.sizes("a")


async def test_an_upload_that_is_cancelled_leaves_nothing(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (bucket.folder / "large.bin").write_bytes(bytes(20 << 20))
    reading, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    read, close = operations._SentFile.read, operations._SentFile.close

    def held(self: Any, size: int | None = -1, /) -> bytes:
        reading.set()
        goes_on.wait(60)
        return read(self, size)

    def closed(self: Any) -> None:
        close(self)
        ended.set()

    monkeypatch.setattr(operations._SentFile, "read", held)
    monkeypatch.setattr(operations._SentFile, "close", closed)
    sending = asyncio.create_task(bucket("upload", source="large.bin", key="large.bin"))
    assert await asyncio.to_thread(reading.wait, 60)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    goes_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert not bucket.objects.sizes("large.bin")


async def test_an_object_that_changes_while_it_is_read(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.store("a", b"first")
    opened = type(bucket.objects).open

    def changing(self: Any, key: str) -> Any:
        file = opened(self, key)
        bucket.store("a", b"other")
        return file

    monkeypatch.setattr(type(bucket.objects), "open", changing)
    error = await bucket.fails("download", key="a", file="x")
    assert (error.kind, error.retryable, "changed while it was read" in str(error)) == ("storage", True, True)
    assert not {path.name for path in bucket.folder.iterdir()} - {"home", "pvc"}


async def test_a_file_that_becomes_shorter_leaves_no_object(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bucket.folder / "log"
    path.write_bytes(bytes(20 << 20))
    read = operations._SentFile.read

    def shortened(self: Any, size: int | None = -1, /) -> bytes:
        with path.open("r+b") as file:
            file.truncate(10)
        return read(self, size)

    monkeypatch.setattr(operations._SentFile, "read", shortened)
    error = await bucket.fails("upload", file="log", key="log")
    assert "became shorter while it was read" in str(error)
    assert not bucket.objects.sizes("log")


async def test_bodies_have_a_limit(bucket: Place, box: ToolContext) -> None:
    bucket.store("a.txt", b"x" * 200)
    box.settings = box.settings.model_copy(update={"http_body_bytes": 100})
    error = await bucket.fails("download", key="a.txt")
    assert "has 200 bytes" in str(error)
    assert "NOETL_HTTP_BODY_BYTES" in str(error)


async def test_metadata_and_content_type(bucket: Place, settings: Settings) -> None:
    await bucket("upload", key="a.json", content={}, metadata={"origin": "lab 7"})
    if bucket.kind == "gcs":
        blob = bucket.objects.bucket.blob("a.json")
        blob.reload()
        assert (blob.content_type, blob.metadata) == ("application/json", {"origin": "lab 7"})
    else:
        found = obstore.get(minio_store(settings), "a.json").attributes
        assert (found["Content-Type"], found["origin"]) == ("application/json", "lab 7")


async def test_a_credential_that_the_store_refuses(run: Run, settings: Settings) -> None:
    auth = {
        "type": "s3",
        "endpoint": settings.minio_endpoint,
        "access_key_id": settings.minio_access_key,
        "secret_access_key": "a-wrong-secret",
    }
    with pytest.raises(ToolError) as caught:
        await run("s3", auth=auth, operation="upload", bucket=settings.minio_bucket, key="a", content="x")
    assert (caught.value.kind, caught.value.retryable) == ("storage_access", False)
    assert "a-wrong-secret" not in str(caught.value)


class TokenServer(BaseHTTPRequestHandler):
    """Google's server of tokens, which counts the requests."""

    requests: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.requests.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        body = b'{"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("form", ["text", "mapping", "file"])
async def test_the_service_account_of_a_credential(
    run: Run,
    box: ToolContext,
    settings: Settings,
    google: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    # else Google's library asks the internet where the account may work
    without = "_is_regional_access_boundary_lookup_required"
    monkeypatch.setattr(service_account.Credentials, without, lambda self: False, raising=False)
    name = settings.minio_bucket
    box.settings = box.settings.model_copy(update={"gcs_endpoint": google.url})
    gcs_client(box.settings).create_bucket(name)
    with HTTPServer(("127.0.0.1", 0), TokenServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {
            "type": "service_account",
            "project_id": "lab",
            "client_email": f"{form}@lab.example",
            "private_key": private_pem(),
            "token_uri": f"http://127.0.0.1:{server.server_port}/token",
        }
        (tmp_path / "account.json").write_text(json.dumps(account))
        given: dict[str, Any] = {
            "text": {"service_account_json": json.dumps(account)},
            "mapping": {"service_account_key": account},
            "file": {"service_account_path": str(tmp_path / "account.json")},
        }[form]
        before = len(TokenServer.requests)
        await run("gcs", auth={"type": "gcs", "bucket": name, **given}, key="a", content="x")
        server.shutdown()
    assert len(TokenServer.requests) > before
    assert GcsBucket(box.settings, name).read("a") == b"x"


async def test_the_token_of_a_credential(run: Run, box: ToolContext, settings: Settings, google: Any) -> None:
    name = settings.minio_bucket
    box.settings = box.settings.model_copy(update={"gcs_endpoint": google.url})
    gcs_client(box.settings).create_bucket(name)
    await run("gcs", auth={"type": "gcs", "bucket": name, "token": "t"}, key="a", content="x")
    assert gcs_client(box.settings, token="t")._credentials.token == "t"
    assert GcsBucket(box.settings, name).read("a") == b"x"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"service_account_key": "no-json-s3cret"}, "the key of the Google service account is not valid"),
        ({"service_account_key": {"project_id": "p"}}, "the key of the Google service account is not valid"),
        ({"service_account_path": "/none/account.json"}, "/none/account.json cannot be read"),
    ],
)
async def test_service_accounts_that_are_none(run: Run, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ToolError, match=text) as caught:
        await run("gcs", auth={"type": "gcs", **fields}, bucket="b", key="a", content="x")
    assert caught.value.kind == "credential"
    assert "s3cret" not in str(caught.value)


async def test_no_bucket_is_named(run: Run) -> None:
    with pytest.raises(ToolError, match="no bucket is named for gcs") as caught:
        await run("gcs", key="a", content="x")
    assert caught.value.kind == "credential"
