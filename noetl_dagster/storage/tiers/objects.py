"""Tiers ``minio`` and ``s3``: any store with the S3 protocol, through obstore's Rust client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, BinaryIO, cast

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.base import CHUNK, Bucket, Bytes, StoredObject, Tier, TierUnavailableError

PART = 8 * 1024 * 1024
"""Bytes per part of a multipart upload; S3 allows 10,000 parts, which makes 80 GB."""

PARTS_IN_FLIGHT = 3

PIECE = 512 * 1024
"""Bytes of a stream that are read at once, at least: the client takes several times as much memory for each."""

WHOLE = 16 * 1024 * 1024
"""Objects up to this size go up in one request."""

CONNECT_TIMEOUT = timedelta(seconds=3)
REQUEST_TIMEOUT = timedelta(seconds=120)
RETRY_TIMEOUT = timedelta(seconds=10)

CLIENTS = 8
"""Clients of buckets that a process keeps.

A new client reads the system's certificates, 7 ms of processor time: more than a small object takes."""


def minio_store(settings: Settings, bucket: str = "", *, patient: bool = False) -> S3Store:
    """Returns the client of a bucket at the minio endpoint.

    Args:
        bucket: empty: that of the minio tier.
        patient: repeat requests for minutes. Otherwise the client gives up soon, so that a fallback tier helps.
    """
    if not settings.minio_endpoint:
        raise TierUnavailableError("minio tier: no endpoint; set NOETL_MINIO_ENDPOINT")
    config = {
        "access_key_id": settings.minio_access_key,
        "secret_access_key": settings.minio_secret_key.get_secret_value(),
        "region": settings.minio_region,
        "session_token": settings.minio_session_token.get_secret_value() or None,
    }
    return s3_client(
        bucket or settings.minio_bucket,
        settings.minio_endpoint,
        config,
        verify=settings.minio_verify,
        retries=None if patient else settings.minio_retries,
    )


def s3_store(settings: Settings, bucket: str = "", *, patient: bool = False) -> S3Store:
    """Returns the client of a bucket with credentials, region and endpoint of the AWS environment.

    ``bucket`` and ``patient`` are as in :func:`minio_store`.
    """
    name = bucket or settings.s3_bucket
    if not name:
        raise StorageError("s3 tier: no bucket; set NOETL_S3_BUCKET")
    return s3_client(name, aws_endpoint(), {}, retries=None if patient else 3)


def s3_client(
    bucket: str,
    endpoint: str | None,
    config: Mapping[str, str | None],
    *,
    verify: bool = True,
    retries: int | None = None,
) -> S3Store:
    """Returns this process's client of a bucket; what ``config`` lacks is the AWS environment's.

    Args:
        endpoint: None: Amazon's own.
        retries: of a request, within seconds; None: as many as obstore makes within minutes.
    """
    present = frozenset((name, value) for name, value in config.items() if value is not None)
    # the client reads the environment itself; a changed one makes another client
    environment = frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))
    return _client(bucket, endpoint, present, environment, verify, retries)


@lru_cache(maxsize=CLIENTS)
def _client(
    bucket: str,
    endpoint: str | None,
    config: frozenset[tuple[str, str]],
    environment: frozenset[tuple[str, str]],
    verify: bool,
    retries: int | None,
) -> S3Store:
    options: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT, "timeout": REQUEST_TIMEOUT}
    if endpoint and endpoint.startswith("http://"):
        options["allow_http"] = True
    if not verify:
        options["allow_invalid_certificates"] = True
    return S3Store(
        bucket,
        client_options=options,
        retry_config=None if retries is None else {"max_retries": retries, "retry_timeout": RETRY_TIMEOUT},
        virtual_hosted_style_request=False,
        **cast(Any, dict(config)),
        **({"endpoint": endpoint} if endpoint else {}),
    )


def aws_endpoint() -> str | None:
    """Returns the S3 endpoint of the AWS environment; None is Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


class S3Bucket(Bucket):
    """A bucket with the S3 protocol."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def read(self, key: str) -> bytes:
        """Returns the bytes of an object."""
        return bytes(obstore.get(self._store, key).bytes())

    def open(self, key: str) -> BinaryIO:
        """Returns a reader that fetches an object while it is read."""
        return cast("BinaryIO", obstore.open_reader(self._store, key, buffer_size=CHUNK))

    def write(
        self,
        key: str,
        file: BinaryIO,
        size: int,
        content_type: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Stores the next ``size`` bytes of a file, in constant memory if they are many. Returns the object's tag."""
        large, pieces = size > WHOLE, _pieces(file, size)
        attributes = {**(metadata or {}), **({"Content-Type": content_type} if content_type else {})}
        stored = obstore.put(
            self._store,
            key,
            pieces if large else b"".join(pieces),
            attributes=attributes or None,
            use_multipart=large,
            chunk_size=PART,
            max_concurrency=PARTS_IN_FLIGHT,
        )
        return _tag(stored["e_tag"])

    def find(self, key: str) -> StoredObject:
        """Returns what the store knows of an object."""
        return _object(obstore.head(self._store, key))

    def objects(self, prefix: str) -> Iterator[list[StoredObject]]:
        """Yields pages of the objects whose keys begin with a prefix; a page may be empty."""
        folder = prefix.rpartition("/")[0]  # the client lists whole folders only
        for page in obstore.list(self._store, prefix=folder or None):
            yield [_object(entry) for entry in page if entry["path"].startswith(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""
        if keys:
            obstore.delete(self._store, list(keys))


def _object(entry: Any) -> StoredObject:
    return StoredObject(entry["path"], entry["size"], _tag(entry["e_tag"]), entry["last_modified"])


def _tag(text: str | None) -> str:
    return (text or "").strip('"')


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next bytes of a file, which may be growing."""
    while size > 0 and (piece := file.read(min(size, CHUNK))):
        size -= len(piece)
        yield piece


@dataclass
class S3Tier(Tier):
    """Objects of one bucket.

    Attributes:
        store: the bucket's client.
        bucket: its name.
        name: tier name for messages.
        credential: the access key id that signs requests (never a secret), for messages.
        create_bucket: create the bucket when it is missing.
    """

    store: S3Store
    bucket: str
    name: str
    credential: str
    create_bucket: bool = False

    def __post_init__(self) -> None:
        self.root = f"s3://{self.bucket}/"

    async def ready(self) -> None:
        """Returns when the bucket answers; creates it if it is missing and may be created."""
        with self._errors("reach", ""):
            try:
                await obstore.list_with_delimiter_async(self.store, prefix=".noetl-ready")
            except (BaseError, FileNotFoundError) as error:  # either way, for a missing bucket
                await self._create(error)

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI; creates a missing bucket as :meth:`ready` does."""
        multipart = len(data) > WHOLE
        try:
            return await self._upload(key, data, multipart)
        except FileNotFoundError as error:
            await self._create(error)
            return await self._upload(key, data, multipart)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        return await self._upload(key, chunks, multipart=True)

    async def _upload(self, key: str, data: Bytes | AsyncIterator[Bytes], multipart: bool) -> str:
        with self._errors("write", key):
            await obstore.put_async(
                self.store,
                key,
                data,
                use_multipart=multipart,
                chunk_size=PART,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        key = self.key(uri)
        with self._errors("read", key):
            response = await obstore.get_async(self.store, key)
            return memoryview(await response.bytes_async())

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object; continues with another request if a slow reader exceeds a time-out."""
        key, done, size = self.key(uri), 0, 1
        with self._errors("read", key):
            while done < size:
                before = done
                try:
                    response = await obstore.get_async(
                        self.store, key, options={"range": {"offset": done}} if done else None
                    )
                    size = response.meta["size"]
                    async for chunk in response.stream(min_chunk_size=PIECE):
                        done += len(chunk)
                        yield memoryview(chunk)
                except BaseError:
                    if done == before:
                        raise

    async def size(self, uri: str) -> int:
        """Returns the number of bytes of an object."""
        key = self.key(uri)
        with self._errors("read", key):
            return int((await obstore.head_async(self.store, key))["size"])

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error. A URI ending in ``/`` is a folder."""
        key = self.key(uri)
        with self._errors("delete", key):
            if not uri.endswith("/"):
                await obstore.delete_async(self.store, key)
                return
            async for page in obstore.list(self.store, prefix=key):
                await obstore.delete_async(self.store, [entry["path"] for entry in page])

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        with self._errors("list", prefix):
            try:
                async for page in obstore.list(self.store, prefix=prefix):
                    yield [entry["path"] for entry in page]
            except (BaseError, FileNotFoundError) as error:
                if isinstance(error, BaseError) and "NoSuchBucket" not in str(error):
                    raise  # else there is no bucket, and so no keys

    async def _create(self, cause: Exception) -> None:
        """Creates the bucket. The S3 client signs object requests only; an empty key is the bucket itself."""
        if "NoSuchBucket" not in str(cause):
            raise cause
        if not self.create_bucket:
            raise StorageError(f"{self.name} tier: no bucket {self.bucket}; create it") from cause
        url = await obstore.sign_async(self.store, "PUT", "", timedelta(minutes=1))

        import aiohttp  # only here, since every process imports this module
        from yarl import URL

        address = URL(url, encoded=True)  # the signature is about this form of it
        timeout = aiohttp.ClientTimeout(10)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as client, client.put(address) as response:
            status, text = response.status, await response.text()
        if status not in (200, 409):  # 409: another process has just created it
            raise StorageError(
                f"{self.name} tier: bucket {self.bucket} cannot be created with access key "
                f"{self.credential}: HTTP {status} {text[:200]}"
            ) from cause
        self.made_bucket = self.made_bucket or status == 200

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        place = f"{self.name} tier: cannot {verb} {self.uri(key)} with access key {self.credential}"
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StorageError(f"{place}: {_denied(error)}") from error
        except FileNotFoundError as error:
            if verb != "read":
                raise
            raise KeyError(self.uri(key)) from error
        except BaseError as error:
            denied = "403 Forbidden" in str(error)
            reason = _denied(error) if denied else str(error).partition("\n")[0]
            raise TierUnavailableError(f"{place}: {reason}") from error


def _denied(error: Exception) -> str:
    """Returns the reason with the S3 error code of a client error, for example ``SignatureDoesNotMatch``."""
    _, _, rest = str(error).partition("<Code>")
    code = rest.partition("</Code>")[0] or "HTTP 403"
    return f"access denied ({code}); check the key pair and the bucket's policy"
