"""Operations on an open bucket: objects are uploaded, downloaded, listed and deleted."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import mimetypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import orjson

from noetl_dagster.errors import ErrorKind, NoetlError, kind_of
from noetl_dagster.storage.tiers.base import CHUNK, StoredObject
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult, as_result_ref, count_of
from noetl_dagster.tools.chunks.files import file_rows, value_of
from noetl_dagster.tools.chunks.gather import Gathering
from noetl_dagster.tools.chunks.writer import ChunkedResult
from noetl_dagster.tools.files import check_path
from noetl_dagster.tools.rows.batches import StoredResult, batches_of, value_or_rows
from noetl_dagster.tools.rows.files import row_writer
from noetl_dagster.tools.rows.formats import FORMAT_BY_ENDING, RowFormat
from noetl_dagster.tools.rows.reader import RowFile, threaded
from noetl_dagster.values import admit, is_table

T = TypeVar("T")

KEYS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Places:
    """What a call names: ``key`` and ``bucket`` of the object, empty if it names none, and ``file``, a local path."""

    bucket: str = ""
    key: str | None = None
    file: str | None = None


@dataclass(slots=True)
class OpenBucket:
    """An open bucket, and the operations of one call on it.

    Attributes:
        root: the URI of all its objects.
        cancelled: the call is; threads that copy for it stop.
    """

    call: ToolCall
    tool_context: ToolContext
    objects: Any
    name: str
    root: str
    cancelled: bool = False

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in a thread, which ends soon and leaves nothing if the call is cancelled."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def upload(self, places: Places) -> dict[str, Any]:
        """Stores a file or the content as one object."""
        call, config = self.call, self.call.config
        has_content = config.get("content") is not None
        if has_content == (places.file is not None):
            raise call.error("upload needs either a local file ('source' or 'file') or 'content'")
        key = places.key or ""
        if places.file is not None and (not key or key.endswith("/")):
            key += PurePosixPath(places.file).name
        if not key or key.endswith("/"):
            raise call.error("upload needs the object's key: 'uri' or 'key'")
        if places.file is not None:
            path = Path(call.folder, places.file)
            if not await asyncio.to_thread(path.is_file):
                raise call.error(f"no file is at {path}", "not_found")
            return await self._send(key, path)
        with tempfile.TemporaryDirectory(prefix="noetl-upload-") as folder:
            return await self._send(key, await self._content(config["content"], key, Path(folder, "content")))

    async def _content(self, value: Any, key: str, path: Path) -> Path:
        """Writes the content to a file."""
        call, format = self.call, self._format(key)
        if (reference := as_result_ref(value)) is not None:
            results = self.tool_context.results
            stored = await results.find(reference if isinstance(reference, str) else reference.ref)
            value = await value_or_rows(stored, results, self.tool_context.settings.chunk_bytes)
        if isinstance(value, str):
            if str(call.config.get("encoding") or "").lower() == "base64":
                try:
                    value = base64.b64decode("".join(value.split()), validate=True)
                except (binascii.Error, ValueError):
                    raise call.error("content is not base64, as 'encoding' says", "parse") from None
            else:
                value = value.encode()
        if isinstance(value, bytes | bytearray | memoryview):
            await asyncio.to_thread(path.write_bytes, value)
            return path
        is_rows = isinstance(value, StoredResult) or is_table(value)
        if format is RowFormat.JSON or (format is None and is_rows):
            value, is_rows = (await value.whole() if isinstance(value, StoredResult) else value), False
        if format in (None, RowFormat.JSON) and not is_rows:
            text = orjson.dumps(admit(value, "content"))
            await asyncio.to_thread(path.write_bytes, text)
            return path
        assert format is not None
        with closing(row_writer(path, format)) as writer:
            async for rows in batches_of(value):
                await asyncio.to_thread(writer.write, rows)
        return path

    async def _send(self, key: str, path: Path) -> dict[str, Any]:
        metadata = self.call.config.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise self.call.error(f"metadata is a mapping of names to texts, not {type(metadata).__name__}")
        texts = {str(name): str(value) for name, value in metadata.items()}
        kind = str(self.call.config.get("content_type") or mimetypes.guess_type(key)[0] or "application/octet-stream")

        def send() -> tuple[int, str]:
            with _SentFile(path, self) as file:
                return file.size, self.objects.write(key, cast(BinaryIO, file), file.size, kind, texts)

        with self._errors("written", key):
            size, etag = await self._in_thread(send)
        return {"uri": self.root + key, "bucket": self.name, "key": key, "bytes": size, "etag": etag}

    async def download(self, places: Places) -> ToolResult:
        """Copies an object to a file, or returns its content."""
        key = places.key
        if not key or key.endswith("/"):
            raise self.call.error("download needs the object's key: 'uri' or 'key'")
        if places.file is None:
            return await self._content_of(key)
        path = Path(self.call.folder, places.file)
        if places.file.endswith("/") or await asyncio.to_thread(path.is_dir):
            path /= PurePosixPath(key).name
        with self._errors("read", key):
            stored = await self._in_thread(self._fetch, key, path)
        fields = {"uri": self.root + key, "bucket": self.name, "key": key, "bytes": stored.bytes, "etag": stored.etag}
        return ToolResult(data={"path": str(path), **fields})

    def _fetch(self, key: str, path: Path) -> StoredObject:
        """Copies an object beside a path, and moves it there as a whole."""
        before: StoredObject = self.objects.find(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".noetl-download-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as target, closing(self.objects.open(key)) as source:
                while not self.cancelled and (block := source.read(CHUNK)):
                    target.write(block)
                size = target.tell()
                os.fchmod(target.fileno(), 0o644)  # other workers may read it
            if self.cancelled:
                return before
            if size != before.bytes or self.objects.find(key).etag != before.etag:
                text = f"{self.root}{key} changed while it was read; read it again"
                raise self.call.error(text, "storage", retryable=True)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
        return before

    async def _content_of(self, key: str) -> ToolResult:
        """Returns the content of an object: rows chunk by chunk, any other value whole."""
        call, context, most = self.call, self.tool_context, self.tool_context.settings.http_body_bytes
        format, uri = self._format(key, "text", "bytes", "base64"), self.root + key
        word = str(call.config.get("format") or "").lower()
        with self._errors("read", key), tempfile.TemporaryDirectory(prefix="noetl-download-") as folder:
            path = Path(folder, "content")

            files: list[RowFile] = []

            async def fetched() -> RowFile:
                if not files:
                    stored = await self._in_thread(self._fetch, key, path)
                    files.append(replace(await RowFile.of(uri, None, str(path)), version=stored.etag))
                return files[0]

            if (word and format is not None) or format not in (None, RowFormat.JSON):
                return await file_rows(fetched, uri, format, call, context)
            size = (await asyncio.to_thread(self.objects.find, key)).bytes
            least = 0 if context.chunks.wanted(call) else context.settings.chunk_bytes
            if format is RowFormat.JSON and size >= least:
                file = await fetched()
                if await file.is_array():
                    return await file_rows(fetched, uri, format, call, context)
            if size > most:
                raise call.error(
                    f"{uri} has {size} bytes, and a result that is no rows has {most} at most (NOETL_HTTP_BODY_BYTES); "
                    "name a file as 'destination', or a 'format' of rows"
                )
            await fetched()
            content = await asyncio.to_thread(path.read_bytes)
        try:
            if word == "base64":
                return ToolResult(data=base64.b64encode(content).decode())
            return ToolResult(
                data=content.decode() if word == "text" else content if word else value_of(content, key, call)
            )
        except ValueError as error:
            raise call.error(f"{uri} is not what its name or 'format' says: {error}", "parse") from None

    async def listed(self) -> ToolResult:
        """Lists the objects below a prefix as rows."""
        prefix, limit = self._prefix() or "", count_of(self.call, "limit")
        chunks = ChunkedResult(self.call, self.tool_context)
        gathering, count, more = Gathering(chunks.chunk_bytes), 0, False
        with self._errors("listed", prefix):
            async for page in threaded(self.objects.objects(prefix)):
                some = page if limit is None else page[: limit - count]
                more = len(some) < len(page)
                count += len(some)
                for gathered in gathering.add(list(map(self._row, some))) if some else ():
                    await chunks.put(gathered)
                if more:
                    break
        if (rest := gathering.rest()) is not None:
            await chunks.put(rest)
        fields = {"bucket": self.name, "prefix": prefix, "count": count, "more": more}
        return await chunks.result(fields, at="rows")

    def _row(self, entry: StoredObject) -> dict[str, Any]:
        return {
            "key": entry.key,
            "uri": self.root + entry.key,
            "bytes": entry.bytes,
            "etag": entry.etag,
            "modified": entry.modified.isoformat(),
        }

    async def delete(self, places: Places) -> dict[str, Any]:
        """Deletes objects by their keys, or those below a prefix; missing ones are no error."""
        keys, prefix = self._keys(places), self._prefix()
        if bool(keys) == bool(prefix):
            raise self.call.error(
                "delete needs either the keys of objects ('uri' or 'key', one or a list), or a 'prefix' that is not "
                "empty"
            )
        deleted = len(keys)
        with self._errors("deleted", prefix or keys[0]):
            for start in range(0, len(keys), KEYS_AT_ONCE):
                await asyncio.to_thread(self.objects.delete, keys[start : start + KEYS_AT_ONCE])
            if prefix:
                async for page in threaded(self.objects.objects(prefix)):
                    await asyncio.to_thread(self.objects.delete, [entry.key for entry in page])
                    deleted += len(page)
        return {"bucket": self.name, "deleted": deleted}

    def _keys(self, places: Places) -> list[str]:
        key_field = self.call.config.get("key")
        if not isinstance(key_field, Sequence) or isinstance(key_field, str):
            return [places.key] if places.key else []
        keys = [str(key).removeprefix(self.root).lstrip("/") for key in key_field]
        if not all(keys) or any("://" in key for key in keys):
            raise self.call.error(f"key: each of the list is a key or an address of bucket {self.name}")
        for key in keys:
            self._check_key(key, "key")
        return keys

    def _prefix(self) -> str | None:
        prefix = self.call.config.get("prefix")
        if prefix is None:
            return None
        text = str(prefix).removeprefix(self.root).lstrip("/")
        if "://" in text:
            raise self.call.error(f"prefix: {text!r:.200} is not in bucket {self.name}")
        self._check_key(text, "prefix")
        return text

    def _check_key(self, text: str, field: str) -> None:
        where = f"{self.call.task.kind} in step {self.call.step}, {field}"
        check_path(
            text, self.call.task.config.get(field), self.call.folder, self.tool_context.settings, where, key=True
        )

    def _format(self, key: str, *others: str) -> RowFormat | None:
        """Returns the format of rows by ``format``, else by the key's ending; None for ``others`` and unknown ones."""
        word = str(self.call.config.get("format") or "").lower()
        format = FORMAT_BY_ENDING.get(f".{word}" if word else PurePosixPath(key).suffix.lower())
        if word and format is None and word not in others:
            formats = ", ".join((*RowFormat, *others))
            raise self.call.error(f"format {word!r} is unknown; known: {formats}")
        return format

    @contextmanager
    def _errors(self, done: str, key: str) -> Iterator[None]:
        """Turns errors of clients and files into ``ToolError``."""
        try:
            yield
        except NoetlError:
            raise
        except Exception as error:
            kind = _kind(error)
            text = f"{self.root}{key} cannot be {done}: {first_line(error)}"
            if kind == "not_found":
                text = f"{self.root}{key} cannot be {done}: there is no such object, or no such bucket"
            raise self.call.error(text, kind, retryable=kind in ("storage", "connection", "timeout")) from None


class _SentFile(io.FileIO):
    """A file that is uploaded with the size that it has now."""

    def __init__(self, path: Path, bucket: OpenBucket) -> None:
        super().__init__(path)
        self.size, self._bucket = os.fstat(self.fileno()).st_size, bucket

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads the next bytes; raises ``OSError`` if the file ends before its size, or the call is cancelled."""
        if self._bucket.cancelled:  # so that the upload leaves nothing
            raise InterruptedError("the call is cancelled")
        at = self.tell()
        left = self.size - at
        data = super().read(left if size is None or size < 0 else min(size, left)) or b""
        if not data and left > 0 and size != 0:
            raise OSError(f"the file became shorter while it was read: {at} of {self.size} bytes")
        return data


def _kind(error: Exception) -> ErrorKind:
    text, name = str(error), type(error).__name__
    if isinstance(error, FileNotFoundError) or name == "NotFound" or "NoSuchBucket" in text:
        return "not_found"
    if "403 Forbidden" in text or "401 Unauthorized" in text:
        return "storage_access"
    if type(error).__module__.startswith("google.auth"):
        return "credential"
    kind = kind_of(error)
    return "storage" if kind == "unknown" else kind


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
