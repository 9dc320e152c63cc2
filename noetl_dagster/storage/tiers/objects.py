"""Tiers ``minio`` and ``s3``: any store with the S3 protocol, through obstore's Rust client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from noetl_dagster.errors import StorageError
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.base import CHUNK, Bytes, TierUnavailableError

if TYPE_CHECKING:
    from obstore.store import RetryConfig

PART = 8 * 1024 * 1024
"""Bytes per part of a multipart upload; S3 allows 10,000 parts, which makes 80 GB."""

PARTS_IN_FLIGHT = 3

PIECE = 512 * 1024
"""Bytes of a stream that are read at once, at least: the client takes several times as much memory for each."""

_RETRIES: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
WHOLE = 16 * 1024 * 1024
"""Objects up to this size go up in one request."""

CLIENTS = 8
"""Clients of buckets that a process keeps.

A new client reads the system's certificates, 7 ms of processor time: more than a small object takes."""


def minio_store(settings: Settings) -> S3Store:
    """Returns the client of the minio tier's bucket, which gives up soon so that a fallback tier helps."""
    if not settings.minio_endpoint:
        raise TierUnavailableError("minio tier: no endpoint; set NOETL_MINIO_ENDPOINT")
    return _minio_client(
        settings.minio_endpoint,
        settings.minio_bucket,
        settings.minio_access_key,
        settings.minio_secret_key.get_secret_value(),
        settings.minio_region,
        settings.minio_session_token.get_secret_value(),
        settings.minio_verify,
        settings.minio_retries,
    )


@lru_cache(maxsize=CLIENTS)
def _minio_client(
    endpoint: str,
    bucket: str,
    access_key: str,
    secret_key: str,
    region: str,
    token: str,
    verify: bool,
    retries: int,
) -> S3Store:
    return S3Store(
        bucket,
        config={"session_token": token} if token else None,
        endpoint=endpoint,
        access_key_id=access_key,
        secret_access_key=secret_key,
        region=region,
        virtual_hosted_style_request=False,
        client_options=_client_options(endpoint) | ({} if verify else {"allow_invalid_certificates": True}),
        retry_config={**_RETRIES, "max_retries": retries},
    )


def s3_store(settings: Settings) -> S3Store:
    """Returns the client of the s3 tier's bucket, with credentials, region and endpoint of the AWS environment."""
    if not settings.s3_bucket:
        raise StorageError("s3 tier: no bucket; set NOETL_S3_BUCKET")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return _s3_client(settings.s3_bucket, aws_endpoint(), frozenset(environment.items()))


@lru_cache(maxsize=CLIENTS)
def _s3_client(bucket: str, endpoint: str | None, environment: frozenset[tuple[str, str]]) -> S3Store:
    """The client reads ``environment`` itself; a changed environment makes another client."""
    given = {"endpoint": endpoint} if endpoint else {}
    return S3Store(bucket, **given, client_options=_client_options(endpoint or ""), retry_config=_RETRIES)


def minio_admin(settings: Settings) -> Any:
    """Returns boto3's client of the minio tier."""
    return _boto_client(
        endpoint_url=settings.minio_endpoint,
        aws_access_key_id=settings.minio_access_key,
        aws_secret_access_key=settings.minio_secret_key.get_secret_value(),
        aws_session_token=settings.minio_session_token.get_secret_value() or None,
        region_name=settings.minio_region,
        verify=None if settings.minio_verify else False,
    )


def s3_admin() -> Any:
    """Returns boto3's client of the AWS environment."""
    return _boto_client(endpoint_url=aws_endpoint())


def _boto_client(**given: Any) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=3, read_timeout=60, retries={"total_max_attempts": 2})
    return boto3.client("s3", config=config, **given)


def aws_endpoint() -> str | None:
    """Returns the S3 endpoint of the AWS environment; None is Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def aws_credential() -> str:
    """Returns the access key id of the AWS environment, or a text that says it is not set."""
    return os.environ.get("AWS_ACCESS_KEY_ID") or "of the AWS environment (AWS_ACCESS_KEY_ID is not set)"


def _client_options(endpoint: str) -> dict[str, Any]:
    return {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=3),
        "timeout": timedelta(seconds=120),
    }


class S3Bucket:
    """A bucket with the S3 protocol, see :class:`~noetl_dagster.storage.tiers.base.Bucket`."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def read(self, key: str) -> bytes:
        """Returns the bytes of an object."""
        return bytes(obstore.get(self._store, key).bytes())

    def open(self, key: str) -> BinaryIO:
        """Returns a reader that fetches an object while it is read."""
        return cast("BinaryIO", obstore.open_reader(self._store, key, buffer_size=CHUNK))

    def write(self, key: str, file: BinaryIO, size: int, content_type: str | None = None) -> None:
        """Stores the next ``size`` bytes of a file, in constant memory if they are many."""
        large = size > WHOLE
        pieces: Iterable[bytes] = _pieces(file, size)
        obstore.put(
            self._store,
            key,
            pieces if large else b"".join(pieces),
            attributes={"Content-Type": content_type} if content_type else None,
            use_multipart=large,
            chunk_size=PART,
            max_concurrency=PARTS_IN_FLIGHT,
        )

    def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of all objects below a prefix by their keys, or those of the object of that name."""
        name = prefix.rstrip("/")
        listed = (entry for page in obstore.list(self._store, prefix=name) for entry in page)
        below = {entry["path"]: entry["size"] for entry in listed if entry["path"] != name}
        if below or prefix.endswith("/"):
            return below
        with suppress(FileNotFoundError):
            return {name: obstore.head(self._store, name)["size"]}
        return {}

    def exists(self, key: str) -> bool:
        """Reports whether an object is stored under a key."""
        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""
        if keys:
            obstore.delete(self._store, list(keys))


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next bytes of a file, which may be growing."""
    while size > 0 and (piece := file.read(min(size, CHUNK))):
        size -= len(piece)
        yield piece


class S3Tier:
    """Objects of one bucket.

    Args:
        store: the bucket's client.
        bucket: its name, for URIs and messages.
        name: tier name for messages.
        admin: makes boto3's client, which can list unfinished uploads; obstore's cannot.
        credential: the access key id that signs requests (never a secret), for messages.
        create_bucket: create the bucket when it is missing.
    """

    def __init__(
        self,
        store: S3Store,
        *,
        admin: Callable[[], Any],
        bucket: str,
        name: str,
        credential: str,
        create_bucket: bool,
    ) -> None:
        self._admin = admin
        self._store = store
        self._bucket = bucket
        self._name = name
        self._credential = credential
        self._create_bucket = create_bucket
        self._made_bucket = False

    @property
    def made_bucket(self) -> bool:
        """Reports whether this object has created the bucket."""
        return self._made_bucket

    def uri(self, key: str) -> str:
        """Returns the URI of an object stored under ``key``."""
        return f"s3://{self._bucket}/{key}"

    async def ready(self) -> None:
        """Returns when the bucket answers; creates it if it is missing and may be created."""
        with self._errors("reach", ""):
            try:
                await obstore.list_with_delimiter_async(self._store, prefix=".noetl-ready")
            except (BaseError, FileNotFoundError) as error:  # either way, for a missing bucket
                await self._create(error)

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI; creates a missing bucket as :meth:`ready` does."""
        try:
            return await self._put(key, data)
        except FileNotFoundError as error:
            await self._create(error)
            return await self._put(key, data)

    async def _put(self, key: str, data: Bytes) -> str:
        with self._errors("write", key):
            await obstore.put_async(
                self._store,
                key,
                data,
                use_multipart=len(data) > WHOLE,
                chunk_size=PART,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        return self.uri(key)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        with self._errors("write", key):
            await obstore.put_async(
                self._store, key, chunks, use_multipart=True, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT
            )
        return self.uri(key)

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        key = self._key(uri)
        with self._errors("read", key):
            try:
                response = await obstore.get_async(self._store, key)
                return memoryview(await response.bytes_async())
            except FileNotFoundError as error:
                raise KeyError(uri) from error

    async def stream(self, uri: str) -> AsyncIterator[Bytes]:
        """Yields the bytes of an object; continues with another request if a slow reader exceeds a time-out."""
        key, done, size = self._key(uri), 0, 1
        with self._errors("read", key):
            while done < size:
                before = done
                try:
                    response = await obstore.get_async(
                        self._store, key, options={"range": {"offset": done}} if done else None
                    )
                    size = response.meta["size"]
                    async for chunk in response.stream(min_chunk_size=PIECE):
                        done += len(chunk)
                        yield memoryview(chunk)
                except FileNotFoundError as error:
                    raise KeyError(uri) from error
                except BaseError:
                    if done == before:
                        raise

    async def exists(self, uri: str) -> bool:
        """Reports whether an object is stored at a URI."""
        key = self._key(uri)
        with self._errors("read", key):
            try:
                await obstore.head_async(self._store, key)
            except FileNotFoundError:
                return False
        return True

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error. A URI ending in ``/`` is a folder."""
        key = self._key(uri)
        with self._errors("delete", key):
            if not uri.endswith("/"):
                await obstore.delete_async(self._store, key)
                return
            async for page in obstore.list(self._store, prefix=key):
                await obstore.delete_async(self._store, [entry["path"] for entry in page])

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        with self._errors("list", prefix), suppress(FileNotFoundError):  # no bucket, no keys
            async for page in obstore.list(self._store, prefix=prefix):
                yield [entry["path"] for entry in page]

    async def abort_uploads(self, prefix: str, before: datetime) -> int:
        """Removes the parts of uploads below a prefix that began before a moment. Returns the number of uploads."""
        return await asyncio.to_thread(self._abort_uploads, prefix, before)

    def _abort_uploads(self, prefix: str, before: datetime) -> int:
        from botocore.exceptions import BotoCoreError, ClientError

        aborted = 0
        try:
            client = self._admin()
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            for upload in (one for page in pages for one in page.get("Uploads", ())):
                if upload["Initiated"] < before:
                    client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    aborted += 1
        except (BotoCoreError, ClientError) as error:
            if "NoSuchBucket" in str(error) or "NoSuchUpload" in str(error):  # completed just now
                return aborted
            raise TierUnavailableError(
                f"{self._name} tier: cannot abort uploads in {self._bucket} with access key {self._credential}: "
                f"{error}"
            ) from error
        return aborted

    async def close(self) -> None:
        """Keeps the client, which belongs to the process."""

    def _key(self, uri: str) -> str:
        prefix = f"s3://{self._bucket}/"
        if not uri.startswith(prefix):
            raise StorageError(f"{self._name} tier: {uri} is not in bucket {self._bucket}")
        return uri.removeprefix(prefix)

    async def _create(self, cause: Exception) -> None:
        """Creates the bucket. The S3 client signs object requests only; an empty key is the bucket itself."""
        import httpx

        if "NoSuchBucket" not in str(cause):
            raise cause
        if not self._create_bucket:
            raise StorageError(f"{self._name} tier: no bucket {self._bucket}; create it") from cause
        url = await obstore.sign_async(self._store, "PUT", "", timedelta(minutes=1))

        async with httpx.AsyncClient(timeout=10) as client:
            response = await client.put(url)
        if response.status_code not in (200, 409):  # 409: another process has just created it
            raise StorageError(
                f"{self._name} tier: bucket {self._bucket} cannot be created with access key "
                f"{self._credential}: HTTP {response.status_code} {response.text[:200]}"
            ) from cause
        self._made_bucket = self._made_bucket or response.status_code == 200

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        place = f"{self._name} tier: cannot {verb} {self.uri(key)} with access key {self._credential}"
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StorageError(f"{place}: {_denied(error)}") from error
        except FileNotFoundError:
            raise
        except BaseError as error:
            reason = _denied(error) if "403 Forbidden" in str(error) else _first_line(error)
            raise TierUnavailableError(f"{place}: {reason}") from error


def _denied(error: Exception) -> str:
    return f"access denied ({_code(error)}); check the key pair and the bucket's policy"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _code(error: Any) -> str:
    """Returns the S3 error code inside a client error, for example ``SignatureDoesNotMatch``."""
    _, _, rest = str(error).partition("<Code>")
    return rest.partition("</Code>")[0] or "HTTP 403"
