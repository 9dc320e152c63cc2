"""Connections to the event log: one pool a process, JSON encoded with orjson in binary form."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import asyncpg
import orjson

from noetl_dagster.errors import ServiceError
from noetl_dagster.process.retrying import RetryLimits, with_retries

DATABASE_AWAY = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a call raises while the server is restarted or unreachable; the last when it goes in mid-statement."""

_STARTING = RetryLimits(
    (OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError),
    seconds=30.0,
    longest_pause=0.5,
)
"""A server that is just being started, whose pool is opened."""

_PLANNING = {"jit": "off", "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
"""Every statement looks rows up by index whatever its parameters are, so a session need not plan it each time."""

_YOUNG_SECONDS, _OLD_SECONDS = 0.25, 60.0
"""Plans are made anew when a session is so old, then each time that it has become three times as old, and at least
once in so long."""

IDLE_SECONDS = 0.01

_JSONB_VERSION = b"\x01"
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode_json(value: Any) -> bytes:
    """JSON bytes of an event's part. NUL characters, which jsonb cannot hold, become U+FFFD."""
    encoded = orjson.dumps(value, default=str, option=_OPTIONS)
    if b"\\u0000" in encoded:
        encoded = encoded.replace(b"\\u0000", b"\\ufffd")
    return encoded


def _encode_jsonb(value: Any) -> bytes:
    return _JSONB_VERSION + encode_json(value)


def _decode_jsonb(value: bytes) -> Any:
    return orjson.loads(value[1:])


_CERTIFICATES = {
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
}


def check_certificates(url: str) -> None:
    """Looks whether the files are there that a connection over TLS reads; asyncpg's own error does not name them.

    Raises:
        ServiceError: one is missing, or may not be read.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    for name, variable in _CERTIFICATES.items():
        path = given.get(name) or os.environ.get(variable)
        if path and not os.access(path, os.R_OK):
            place = f"{name} of the database's address" if name in given else variable
            raise ServiceError(
                f"{place}: there is no file {path} that may be read; mount it, or correct the path"
            )


async def prepare_connection(connection: asyncpg.Connection) -> None:
    """Gives a connection the codecs that the event log expects."""
    await connection.set_type_codec(
        "jsonb", schema="pg_catalog", encoder=_encode_jsonb, decoder=_decode_jsonb, format="binary"
    )


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A session whose plans do not outlive the sizes of the tables that they were made for.

    On an empty table all indexes cost the same; the one that was taken then may be the wrong one for a million rows.
    """

    __slots__ = ("_due", "_opened")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._opened = time.monotonic()
        self._due = self._opened + _YOUNG_SECONDS

    async def plan_anew(self) -> None:
        """Forgets the plans where they are old."""
        now = time.monotonic()
        if now >= self._due:
            await self.execute("DISCARD PLANS")
            self._due = now + min(2 * (now - self._opened), _OLD_SECONDS)


async def _plan_anew(connection: Any) -> None:
    await connection.plan_anew()


async def _keep(connection: asyncpg.Connection) -> None:
    """Statements on the event log leave nothing behind in a session: no settings, locks or listeners.

    asyncpg's own reset costs a round trip at every release. Transactions it ends in any case.
    """


async def open_pool(url: str, *, size: int = 8, application: str = "noetl") -> asyncpg.Pool:
    """Opens the pool of a process.

    Raises:
        ServiceError: the server cannot be reached within 30 seconds, or a certificate of the address is missing.
    """
    check_certificates(url)

    async def connect() -> asyncpg.Pool:
        return await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=size,
            connection_class=_Connection,
            init=prepare_connection,
            setup=_plan_anew,
            reset=_keep,
            server_settings={"application_name": application, **_PLANNING},
        )

    try:
        return await with_retries(connect, _STARTING)
    except _STARTING.failures as error:
        raise ServiceError(
            f"the event log does not answer: {error}; check NOETL_DB_URL or run 'noetl-dagster services up'"
        ) from error


class KeptConnection:
    """Runs small statements, one at a time, on a connection that stays out of the pool between them.

    Taking a connection from asyncpg's pool and giving it back costs a task and several turns of the event
    loop: a fifth of the time of a single insert. The connection goes back by itself once nobody has used it
    for :data:`IDLE_SECONDS`, so there is nothing to close, and the pool misses it only while it works.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._connection: Any = None
        self._busy = False
        self._used = 0.0
        self._returning: asyncio.Task[None] | None = None

    async def fetchval(self, query: str, *values: Any) -> Any:
        """The first value that a statement gives; from the pool's own connections while this one is busy."""
        if self._busy:
            return await self._pool.fetchval(query, *values)
        self._busy = True
        try:
            if self._connection is None:
                self._connection = await self._pool.acquire()
                self._look_later()
            return await self._connection.fetchval(query, *values)
        finally:
            self._busy = False
            self._used = asyncio.get_running_loop().time()
            if self._connection is not None and self._connection.is_closed():
                self._give_back()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self._connection is None:
            return
        if self._busy or asyncio.get_running_loop().time() - self._used < IDLE_SECONDS:
            self._look_later()
        else:
            self._give_back()

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        self._returning = asyncio.get_running_loop().create_task(self._pool.release(connection))
