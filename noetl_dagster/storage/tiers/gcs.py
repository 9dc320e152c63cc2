"""Tier ``gcs``: Google Cloud Storage through its own client.

obstore's GCS client speaks the XML API, which the emulator used in tests does not answer; Google's client
speaks the JSON API to both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


def gcs_client(settings: Settings) -> Any:
    """A client with the credentials of the Google environment; with an endpoint set, anonymous."""
    return _new_client(settings.gcs_endpoint)


@lru_cache(maxsize=8)
def shared_client(endpoint: str | None) -> Any:
    """As :func:`gcs_client`, made once a process: each client asks Google for a token of its own."""
    return _new_client(endpoint)


def _new_client(endpoint: str | None) -> Any:
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ImportError as error:
        raise StorageError("gcs tier: google-cloud-storage is missing; install noetl-dagster[gcs]") from error
    if endpoint:
        return storage.Client(
            project="noetl",
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
            client_options={"api_endpoint": endpoint},
        )
    return storage.Client()


class GcsTier:
    """Objects of one bucket."""

    def __init__(self, settings: Settings) -> None:
        if not settings.gcs_bucket:
            raise StorageError("gcs tier: no bucket; set NOETL_GCS_BUCKET")
        self._settings = settings
        self._bucket_name = settings.gcs_bucket
        self._client: Any = None

    def uri(self, key: str) -> str:
        return f"gs://{self._bucket_name}/{key}"

    async def ready(self) -> None:
        with self._errors("reach", ""):
            there = await asyncio.to_thread(lambda: self._bucket().exists(timeout=10))
        if not there:
            raise StorageError(f"gcs tier: no bucket {self._bucket_name}; create it")

    async def put(self, key: str, data: Bytes) -> str:
        with self._errors("write", key):
            await asyncio.to_thread(lambda: self._blob(key).upload_from_string(bytes(data), timeout=120))
        return self.uri(key)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        with self._errors("write", key):
            writer = await asyncio.to_thread(lambda: self._blob(key).open("wb", chunk_size=2 * CHUNK))
            try:
                async for chunk in chunks:
                    await asyncio.to_thread(writer.write, chunk)
            except BaseException:
                writer.terminate()  # an upload that is not finished leaves nothing
                raise
            await asyncio.to_thread(writer.close)
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        key = self._key(uri)
        with self._errors("read", key):
            data: bytes = await asyncio.to_thread(lambda: self._blob(key).download_as_bytes(timeout=120))
        return data

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        key = self._key(uri)
        with self._errors("read", key):
            reader = await asyncio.to_thread(lambda: self._blob(key).open("rb", chunk_size=CHUNK))
            while chunk := await asyncio.to_thread(reader.read, CHUNK):
                yield chunk

    async def exists(self, uri: str) -> bool:
        key = self._key(uri)
        with self._errors("read", key):
            return bool(await asyncio.to_thread(lambda: self._blob(key).exists(timeout=30)))

    async def delete(self, uri: str) -> None:
        await asyncio.to_thread(self._delete, uri)

    def _delete(self, uri: str) -> None:
        key = self._key(uri)
        with self._errors("delete", key):
            if uri.endswith("/"):
                for blob in self._bucket().list_blobs(prefix=key):
                    blob.delete()
            elif self._blob(key).exists():
                self._blob(key).delete()

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        with self._errors("list", prefix):
            pages = self._bucket().list_blobs(prefix=prefix).pages
            while (page := await asyncio.to_thread(next, pages, None)) is not None:
                yield [blob.name for blob in page]

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _bucket(self) -> Any:
        if self._client is None:
            self._client = gcs_client(self._settings)
        return self._client.bucket(self._bucket_name)

    def _blob(self, key: str) -> Any:
        return self._bucket().blob(key)

    def _key(self, uri: str) -> str:
        prefix = f"gs://{self._bucket_name}/"
        if not uri.startswith(prefix):
            raise StorageError(f"gcs tier: {uri} is not in bucket {self._bucket_name}")
        return uri.removeprefix(prefix)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth

        place = f"gcs tier: cannot {verb} {self.uri(key)}"
        try:
            yield
        except api.NotFound as error:
            if verb == "read":
                raise KeyError(self.uri(key)) from error
            raise StorageError(f"{place}: no bucket {self._bucket_name}; create it") from error
        except (api.Forbidden, api.Unauthorized, auth.DefaultCredentialsError) as error:
            raise StorageError(f"{place}: access denied; check GOOGLE_APPLICATION_CREDENTIALS") from error
        except (api.GoogleAPIError, auth.TransportError, OSError) as error:
            raise TierUnavailableError(f"{place}: {error}") from error
