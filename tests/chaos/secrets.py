"""Looks for secrets, byte by byte, in everything that an installation stores, logs and shows.

The bytes are searched in overlapping pieces, also after they are decompressed, so that no table, object or file is ever
whole in memory.
"""

from __future__ import annotations

import base64
import html
import json
import re
import struct
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import boto3
import httpx
import lz4.frame
import nats
import psutil
import pyarrow as pa
import pyarrow.parquet
import zstandard
from nats.js.errors import NotFoundError

from noetl_dagster.setting_types import separate_addresses
from noetl_dagster.settings import Settings

PIECE = 1024 * 1024
MOST_PAGES = 500
PARQUET = b"PAR1"

TABLES = """
SELECT quote_ident(nspname) || '.' || quote_ident(relname) AS name FROM pg_class JOIN pg_namespace
ON pg_namespace.oid = relnamespace WHERE relkind IN ('r', 'm') AND nspname NOT IN ('pg_catalog', 'information_schema')
ORDER BY 1
"""
COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)


@dataclass(frozen=True, order=True)
class Found:
    """A secret in a place, and the form in which it is there."""

    place: str
    form: str
    secret: str


class Canaries:
    """Secrets in all their forms, in the order of how likely they are."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._needles = {needle: (form, one) for one in secrets for form, needle in forms_of(one)}
        self._longest = max(map(len, self._needles))

    def find(self, place: str, pieces: Iterable[bytes]) -> Iterator[Found]:
        """Yields what consecutive pieces contain, each form once; also across their ends."""
        seen, tail = set[bytes](), b""
        for piece in pieces:
            window = tail + piece
            for needle, (form, secret) in self._needles.items():
                if needle not in seen and needle in window:
                    seen.add(needle)
                    yield Found(place, form, secret)
            tail = window[1 - self._longest :]

    def find_all(self, place: str, content: bytes) -> Iterator[Found]:
        """Yields what a value contains, as it is and decompressed."""
        yield from self.find(place, [content])
        if unpack := unpacker_of(content):
            yield from self.find(f"{place}, decompressed", unpack([content]))
        elif content[:4] == PARQUET:
            yield from self.find(f"{place}, as a table", columns_of(pa.BufferReader(content)))


def forms_of(secret: str) -> Iterator[tuple[str, bytes]]:
    """Yields the texts by which a secret is found in bytes."""
    raw = secret.encode()
    yield "plain", raw
    yield "UTF-16", secret.encode("utf-16-le")
    for is_ascii in (True, False):
        written = json.dumps(secret, ensure_ascii=is_ascii)
        yield "JSON", written[1:-1].encode()
        yield "JSON in JSON", json.dumps(written, ensure_ascii=is_ascii)[3:-3].encode()
    yield "HTML", html.escape(secret).encode()
    yield "Python", repr(secret)[1:-1].encode()
    yield "URL", urllib.parse.quote(secret, safe="").encode()
    yield "URL path", urllib.parse.quote(secret).encode()
    yield "form", urllib.parse.quote_plus(secret).encode()
    yield "hexadecimal", raw.hex().encode()
    yield "hexadecimal", raw.hex().upper().encode()
    for before in range(3):
        # the characters at both ends also depend on the bytes around the secret
        encoded = base64.b64encode(bytes(before) + raw)[(0, 2, 3)[before] : 4 * (before + len(raw)) // 3]
        yield "base64", encoded
        yield "base64url", encoded.replace(b"+", b"-").replace(b"/", b"_")


# -- bytes of files, objects and values -----------------------------------------------------------------


def unpacker_of(head: bytes) -> Any:
    """Returns a function that decompresses pieces, by the first bytes of the content; None if they are not compressed."""
    if head[:2] == b"\x1f\x8b" or (head[:1] == b"\x78" and len(head) > 2 and int.from_bytes(head[:2]) % 31 == 0):
        return lambda pieces: _unpacked(zlib.decompressobj(wbits=32 + zlib.MAX_WBITS), pieces)
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return lambda pieces: _unpacked(zstandard.ZstdDecompressor().decompressobj(), pieces)
    if head[:4] == b"\x04\x22\x4d\x18":
        return lambda pieces: _unpacked(lz4.frame.LZ4FrameDecompressor(), pieces)
    return None


def _unpacked(unpacker: Any, pieces: Iterable[bytes]) -> Iterator[bytes]:
    with suppress(zlib.error, zstandard.ZstdError, RuntimeError, EOFError):  # it only looked compressed, or is cut off
        for piece in pieces:
            for start in range(0, len(piece), PIECE // 16):
                yield unpacker.decompress(piece[start : start + PIECE // 16])


def columns_of(file: Any) -> Iterator[bytes]:
    """Yields the values of a Parquet file, whose pages may be compressed."""
    with suppress(pa.ArrowException, OSError):
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for column in batch.columns:
                yield from (buffer.to_pybytes() for buffer in column.buffers() if buffer is not None)


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yields a file in pieces."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def in_files(canaries: Canaries, folders: Iterable[Path]) -> Iterator[Found]:
    """Searches files at any depth, and their names; those that end meanwhile have no place any more."""
    for path in (path for folder in folders for path in [folder, *folder.rglob("*")]):
        with suppress(FileNotFoundError, PermissionError):
            yield from canaries.find(f"name of {path}", [str(path).encode()])
            if not path.is_file() or path.is_symlink():
                continue
            yield from canaries.find(f"file {path}", pieces_of(path))
            with path.open("rb") as file:
                head = file.read(4)
            if unpack := unpacker_of(head):
                yield from canaries.find(f"file {path}, decompressed", unpack(pieces_of(path)))
            elif head == PARQUET:
                yield from canaries.find(f"file {path}, as a table", columns_of(path))


def in_processes(canaries: Canaries, pids: Iterable[int], *, environments: bool = True) -> Iterator[Found]:
    """Searches the command lines of processes and their descendants, and what ``/proc`` shows of their environment."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for one in [root, *root.children(recursive=True)]:
                for name in ("cmdline", *(["environ"] if environments else [])):
                    with suppress(OSError):
                        content = Path(f"/proc/{one.pid}/{name}").read_bytes()
                        yield from canaries.find(f"{name} of process {one.pid}", [content])


# -- PostgreSQL -----------------------------------------------------------------------------------------


class _Rows:
    """Takes apart the binary format of COPY (PostgreSQL's documentation, "Binary Format" of COPY)."""

    def __init__(self, canaries: Canaries, table: str) -> None:
        self.found: set[Found] = set()
        self._canaries = canaries
        self._table = table
        self._rest = b""
        self._fields = -1  # of the row that is being read

    async def take(self, data: bytes) -> None:
        """Takes the next bytes; a field is searched when all of it is there."""
        self._rest += data
        at = len(COPY_HEAD) if self._rest.startswith(COPY_HEAD[:11]) else 0
        while True:
            if self._fields <= 0:
                if len(self._rest) < at + 2:
                    break
                [self._fields] = struct.unpack_from(">h", self._rest, at)
                at += 2
                if self._fields == -1:
                    break
                continue
            if len(self._rest) < at + 4:
                break
            size = max(0, struct.unpack_from(">i", self._rest, at)[0])
            if len(self._rest) < at + 4 + size:
                break
            self.found |= set(self._canaries.find_all(f"table {self._table}", self._rest[at + 4 : at + 4 + size]))
            at, self._fields = at + 4 + size, self._fields - 1
        self._rest = self._rest[at:]


async def in_database(canaries: Canaries, url: str) -> AsyncIterator[Found]:
    """Searches every value of every table, as bytes: also of bytea, and of what TOAST compresses."""
    connection = await asyncpg.connect(url)
    try:
        for row in await connection.fetch(TABLES):
            rows = _Rows(canaries, row["name"])
            await connection.copy_from_query(f"SELECT * FROM {row['name']}", output=rows.take, format="binary")
            for one in rows.found:
                yield one
    finally:
        await connection.close()


# -- NATS, the object store and the pages ----------------------------------------------------------------


async def in_streams(canaries: Canaries, settings: Settings) -> AsyncIterator[Found]:
    """Searches every message of the streams of an installation, those of its key-value buckets included."""
    assert settings.nats_url is not None
    client = await nats.connect(separate_addresses(settings.nats_url))
    try:
        stream = client.jetstream()
        for info in await stream.streams_info():
            name = info.config.name or ""
            if settings.nats_namespace.lower() not in name.lower().replace("_", "-"):
                continue
            for number in range(max(1, info.state.first_seq), info.state.last_seq + 1):
                with suppress(NotFoundError):  # removed meanwhile
                    message = await stream.get_msg(name, number)
                    content = f"{message.subject} {message.headers}\n".encode()
                    for one in (*canaries.find(f"stream {name}", [content]),
                                *canaries.find_all(f"stream {name}", message.data or b"")):  # fmt: skip
                        yield one
    finally:
        await client.close()


def in_objects(canaries: Canaries, settings: Settings) -> Iterator[Found]:
    """Searches the names and the content of all objects of the installation's bucket."""
    client = boto3.client(
        "s3",
        endpoint_url=settings.minio_endpoint,
        aws_access_key_id=settings.minio_access_key,
        aws_secret_access_key=settings.minio_secret_key.get_secret_value(),
        region_name=settings.minio_region,
    )
    try:
        pages = list(client.get_paginator("list_objects_v2").paginate(Bucket=settings.minio_bucket))
    except client.exceptions.NoSuchBucket:
        return
    for key in (one["Key"] for page in pages for one in page.get("Contents", ())):
        place = f"object {key}"
        yield from canaries.find(f"name of {place}", [key.encode()])

        def pieces(key: str = key) -> Iterator[bytes]:
            yield from client.get_object(Bucket=settings.minio_bucket, Key=key)["Body"].iter_chunks(PIECE)

        yield from canaries.find(place, pieces())
        head = next(pieces(), b"")[:4]
        if unpack := unpacker_of(head):
            yield from canaries.find(f"{place}, decompressed", unpack(pieces()))
        elif head == PARQUET:
            yield from canaries.find(f"{place}, as a table", columns_of(pa.BufferReader(b"".join(pieces()))))


@asynccontextmanager
async def _answers(client: httpx.AsyncClient, path: str) -> AsyncIterator[bytes]:
    """Yields an answer with its headers; of one that does not end, what arrives first."""
    async with client.stream("GET", path, timeout=20) as answer:
        content = f"{answer.status_code} {answer.headers}\n".encode()
        with suppress(httpx.TimeoutException):
            async for piece in answer.aiter_bytes():
                content += piece
                if answer.headers.get("content-type", "").startswith("text/event-stream") or len(content) > 16 * PIECE:
                    break
        yield content


async def in_pages(canaries: Canaries, client: httpx.AsyncClient, execution_ids: Sequence[int]) -> AsyncIterator[Found]:
    """Searches the answers of the HTTP API about executions, and all that its pages lead to."""
    documented = (await client.get("/openapi.json")).json()["paths"]
    waiting = [
        "/",
        "/metrics",
        "/health",
        *(path for path, one in documented.items() if "get" in one and "{" not in path),
    ]
    for execution_id in execution_ids:
        waiting += [f"/executions/{execution_id}"]
        waiting += [
            path.replace("{execution_id}", str(execution_id))
            for path, operations in documented.items()
            if "get" in operations and re.findall(r"{.*?}", path) == ["{execution_id}"]
        ]
    seen = set(waiting)
    while waiting and len(seen) < MOST_PAGES:
        path = waiting.pop()
        async with _answers(client, path) as content:
            for one in canaries.find_all(f"page {path}", content):
                yield one
        for link in re.findall(rb'(?:href|src|action|hx-get|data-[a-z-]+)="(/[^"#]*)', content):
            target = link.decode().replace("&amp;", "&")
            if target not in seen and not target.startswith(("/static/", "/logout")):
                seen.add(target)
                waiting.append(target)


async def search(
    settings: Settings,
    secrets: Iterable[str],
    folders: Iterable[Path] = (),
    *,
    pages: httpx.AsyncClient | None = None,
    execution_ids: Sequence[int] = (),
    pids: Iterable[int] = (),
) -> list[Found]:
    """Returns where secrets are in what an installation has left.

    Args:
        settings: with the addresses of its services; its databases, streams and bucket are searched.
        folders: its files: logs, crash reports, outputs, the store files of its servers.
        pages: a client of its HTTP API.
        execution_ids: the executions whose pages are searched.
        pids: processes whose command lines and environments must have none.
    """
    canaries = Canaries(secrets)
    found = {*in_files(canaries, folders), *in_processes(canaries, pids), *in_objects(canaries, settings)}
    for url in {settings.db_url, settings.dagster_db_url} - {None}:
        found |= {one async for one in in_database(canaries, str(url))}
    found |= {one async for one in in_streams(canaries, settings)}
    if pages is not None:
        found |= {one async for one in in_pages(canaries, pages, execution_ids)}
    return sorted(found)
