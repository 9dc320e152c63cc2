"""Tier ``gcs``: Google Cloud Storage through Google's client, which no other module uses.

obstore's client uploads through the XML API, which the emulator of the tests refuses (``invalid uploadType``).
Google's client uses the JSON API, which both support.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, BinaryIO, TypeVar, cast

import orjson

from noetl_dagster.errors import CredentialError, StorageError
from noetl_dagster.extras import needs_extra
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.base import CHUNK, Bucket, Bytes, StoredObject, Tier, TierUnavailableError

T = TypeVar("T")


def gcs_client(settings: Settings, account: str | None = None, token: str | None = None) -> Any:
    """Returns this process's client: with the Google environment's credentials, or anonymous at an endpoint.

    Processes make one client, since each asks Google for its own token.

    Args:
        account: the key of a service account, as JSON, whose credentials it has instead.
        token: an access token, which it has instead.

    Raises:
        CredentialError: the key is none.
    """
    return _client(settings.gcs_endpoint, os.getpid(), account, token)


@lru_cache(maxsize=8)
def _client(endpoint: str | None, process: int, account: str | None, token: str | None) -> Any:
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
        from google.oauth2.credentials import Credentials
    except ImportError as error:
        raise StorageError(needs_extra("tier gcs", "gcs")) from error
    options = {"api_endpoint": endpoint} if endpoint else None
    if account is not None:
        try:
            info = orjson.loads(account)
            return storage.Client.from_service_account_info(info, project=info["project_id"], client_options=options)
        except (ValueError, TypeError, KeyError) as error:  # the message would show parts of the key
            raise CredentialError(
                f"the key of the Google service account is not valid ({type(error).__name__})"
            ) from None
    if token is not None:
        access = Credentials(token)  # type: ignore[no-untyped-call]
        return storage.Client(project="noetl", credentials=access, client_options=options)
    if endpoint:
        anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
        return storage.Client(project="noetl", credentials=anonymous, client_options=options)
    return storage.Client()


class GcsBucket(Bucket):
    """A bucket of Google Cloud Storage, with the methods of :class:`~noetl_dagster.storage.tiers.objects.S3Bucket`.

    Args:
        account, token: see :func:`gcs_client`.
    """

    def __init__(
        self,
        settings: Settings,
        bucket: str,
        *,
        account: str | None = None,
        token: str | None = None,
    ) -> None:
        self.bucket = gcs_client(settings, account, token).bucket(bucket)
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._retry = DEFAULT_RETRY

    def read(self, key: str) -> bytes:
        """Returns the bytes of an object."""
        with _missing_as_file_error():
            data: bytes = self.bucket.blob(key).download_as_bytes(timeout=120, retry=self._retry)
        return data

    def open(self, key: str) -> BinaryIO:
        """Returns a reader that fetches an object while it is read."""
        with _missing_as_file_error():
            blob = self.bucket.blob(key)
            blob.reload(timeout=30, retry=self._retry)
            return cast("BinaryIO", blob.open("rb", chunk_size=CHUNK))

    def write(
        self,
        key: str,
        file: BinaryIO,
        size: int,
        content_type: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Stores the next ``size`` bytes of a file; Google compares its checksum with the client's.

        Returns the object's tag.
        """
        blob = self.bucket.blob(key, chunk_size=2 * CHUNK if size > 2 * CHUNK else None)
        blob.metadata = dict(metadata) if metadata else None
        with _missing_as_file_error():
            blob.upload_from_file(
                file, size=size, content_type=content_type, checksum="crc32c", timeout=600, retry=self._retry
            )
        return str(blob.etag or "")

    def find(self, key: str) -> StoredObject:
        """Returns what the store knows of an object."""
        blob = self.bucket.blob(key)
        with _missing_as_file_error():
            blob.reload(timeout=30, retry=self._retry)
        return _object(blob)

    def objects(self, prefix: str) -> Iterator[list[StoredObject]]:
        """Yields pages of the objects whose keys begin with a prefix."""
        with _missing_as_file_error():
            for page in self.bucket.list_blobs(prefix=prefix or None, timeout=30, retry=self._retry).pages:
                yield [_object(blob) for blob in page]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""
        self.bucket.delete_blobs(list(keys), on_error=lambda _: None, timeout=30, retry=self._retry)


def _object(blob: Any) -> StoredObject:
    return StoredObject(blob.name, blob.size, blob.etag or "", blob.updated)


@contextmanager
def _missing_as_file_error() -> Iterator[None]:
    from google.api_core.exceptions import NotFound

    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(str(error)) from error


class GcsTier(Tier):
    """Objects of one bucket."""

    def __init__(self, settings: Settings) -> None:
        if not settings.gcs_bucket:
            raise StorageError("gcs tier: no bucket; set NOETL_GCS_BUCKET")
        self._settings = settings
        self._name = settings.gcs_bucket
        self.root = f"gs://{self._name}/"

    async def ready(self) -> None:
        """Raises ``StorageError`` if the bucket is missing or the store does not answer."""
        if not await self._run("reach", "", lambda objects: objects.bucket.exists(timeout=10)):
            raise StorageError(f"gcs tier: no bucket {self._name}; create it")

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        await self._run("write", key, lambda one: one.bucket.blob(key).upload_from_string(bytes(data), timeout=120))
        return self.uri(key)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        writer = await self._run(
            "write", key, lambda objects: objects.bucket.blob(key).open("wb", chunk_size=2 * CHUNK)
        )
        with self._errors("write", key):
            try:
                async for chunk in chunks:
                    await asyncio.to_thread(writer.write, chunk)
            except BaseException:
                writer.terminate()  # an unfinished upload leaves nothing
                raise
            await asyncio.to_thread(writer.close)
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        key = self.key(uri)
        return await self._run("read", key, lambda objects: objects.read(key))

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object in order, in constant memory."""
        key = self.key(uri)
        reader = await self._run("read", key, lambda objects: objects.bucket.blob(key).open("rb", chunk_size=CHUNK))
        with self._errors("read", key):
            while chunk := await asyncio.to_thread(reader.read, CHUNK):
                yield chunk

    async def size(self, uri: str) -> int:
        """Returns the number of bytes of an object."""
        key = self.key(uri)
        return await self._run("read", key, lambda objects: objects.find(key).bytes)

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error. A URI ending in ``/`` is a folder."""
        key = self.key(uri)
        is_folder = uri.endswith("/")
        await self._run("delete", key, lambda objects: objects.delete([*objects.sizes(key)] if is_folder else [key]))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        pages = await self._run("list", prefix, lambda objects: objects.bucket.list_blobs(prefix=prefix).pages)
        with self._errors("list", prefix):
            while (page := await asyncio.to_thread(next, pages, None)) is not None:
                yield [blob.name for blob in page]

    async def _run(self, verb: str, key: str, action: Callable[[GcsBucket], T]) -> T:
        """Runs an action in a thread, with this process's client."""
        with self._errors(verb, key):
            return await asyncio.to_thread(lambda: action(GcsBucket(self._settings, self._name)))

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth

        place = f"gcs tier: cannot {verb} {self.uri(key)}"
        try:
            yield
        except (api.NotFound, FileNotFoundError) as error:
            if verb == "read":
                raise KeyError(self.uri(key)) from error
            raise StorageError(f"{place}: no bucket {self._name}; create it") from error
        except (api.Forbidden, api.Unauthorized, auth.DefaultCredentialsError) as error:
            raise StorageError(f"{place}: access denied; check GOOGLE_APPLICATION_CREDENTIALS") from error
        except (api.GoogleAPIError, auth.TransportError, OSError) as error:
            raise TierUnavailableError(f"{place}: {error}") from error
