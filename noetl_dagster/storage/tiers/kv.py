"""Tier ``kv``: small results in a NATS JetStream key-value bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import nats
from nats.errors import Error as NatsError
from nats.js.errors import BucketNotFoundError, KeyNotFoundError

from noetl_dagster.process.jetstream import pages_of_keys
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.setting_types import without_login
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.base import Bytes, Tier, TierTooSmallError, TierUnavailableError

ANSWER_SECONDS = 5.0
"""How long a request waits for its answer."""

_HEADERS = 4096
"""Bytes of a NATS message left for its headers and subject."""


class _NoServerError(TierUnavailableError):
    """No NATS server is configured."""


_PATIENCE = RetryLimits((TierUnavailableError,), final=(_NoServerError,), seconds=10.0)
"""For reads, which no other tier can answer; as long as the clients of object stores try."""


class KvTier(Tier):
    """Objects as values of one bucket; at most one NATS message (1 MB by default) each."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.nats_url
        self._servers = settings.nats_servers
        self._replicas = settings.nats_replicas
        self._tls = settings.nats_tls
        self._bucket_name = f"{settings.nats_namespace}_results"
        self.root = f"kv://{self._bucket_name}/"
        self._client: Any = None
        self._bucket: Any = None
        self._opening = asyncio.Lock()

    async def ready(self) -> None:
        """Returns when the store answers."""
        await self._open()

    async def put(self, key: str, data: Bytes) -> str:
        """Stores an object and returns its URI."""
        bucket = await self._open()
        if len(data) > self._client.max_payload - _HEADERS:
            raise TierTooSmallError(
                f"kv tier: {len(data)} bytes are more than a NATS message holds ({self._client.max_payload})"
            )
        with self._errors(f"write {self.uri(key)}"):
            await bucket.put(key, bytes(data))
        return self.uri(key)

    async def put_stream(self, key: str, chunks: AsyncIterator[Bytes]) -> str:
        """Stores an object in constant memory; if ``chunks`` raises, nothing is left."""
        await self._open()
        whole = bytearray()
        async for chunk in chunks:
            whole += chunk
            if len(whole) > self._client.max_payload:
                raise TierTooSmallError("kv tier: the stream is longer than a NATS message; use another tier")
        return await self.put(key, bytes(whole))

    async def get(self, uri: str) -> Bytes:
        """Returns the bytes of an object."""
        return await with_retries(partial(self._read, uri), _PATIENCE)

    async def _read(self, uri: str) -> Bytes:
        bucket = await self._open()
        with self._errors(f"read {uri}"):
            try:
                entry = await bucket.get(self.key(uri))
            except KeyNotFoundError as error:
                raise KeyError(uri) from error
        value: bytes = entry.value or b""
        return value

    async def delete(self, uri: str) -> None:
        """Removes an object; a missing one is no error."""
        bucket = await self._open()
        with self._errors(f"delete {uri}"):
            await bucket.purge(self.key(uri))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields pages of the keys below a prefix."""
        await self._open()
        with self._errors("list keys"):
            async for page in pages_of_keys(self._client.jetstream(), self._bucket_name):
                yield [key for key in page if key.startswith(prefix)]

    async def close(self) -> None:
        """Releases connections."""
        client, self._client, self._bucket = self._client, None, None
        if client is not None:
            await client.close()

    async def _open(self) -> Any:
        async with self._opening:
            if self._bucket is not None and self._client.is_connected:
                return self._bucket
            await self.close()
            if not self._url:
                raise _NoServerError("kv tier: no NATS server; set NOETL_NATS_URL")
            with self._errors("connect"):
                self._client = await nats.connect(
                    self._servers,
                    tls=self._tls,
                    connect_timeout=2,
                    max_reconnect_attempts=1,
                    error_cb=_ignore,
                    name="noetl-results",
                )
                stream = self._client.jetstream(timeout=ANSWER_SECONDS)
                try:
                    self._bucket = await stream.key_value(self._bucket_name)
                except BucketNotFoundError:
                    self._bucket = await stream.create_key_value(
                        bucket=self._bucket_name, history=1, replicas=self._replicas
                    )
            return self._bucket

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (NatsError, OSError, TimeoutError) as error:
            place, reason = ",".join(map(without_login, self._servers)), str(error) or type(error).__name__
            raise TierUnavailableError(f"kv tier: cannot {action} at {place}: {reason}") from error


async def _ignore(error: Exception) -> None:
    """Ignores the client's report of connection errors, which callers get as exceptions."""
