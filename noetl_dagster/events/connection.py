"""Connections to the event log: one pool per process, JSON encoded with orjson in binary form."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import asyncpg
import orjson

from noetl_dagster.errors import ServiceError
from noetl_dagster.process.retrying import RetryLimits, with_retries
from noetl_dagster.values import encode_json

CONNECTION_LOST = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""Exceptions of a call whose connection breaks; the last one if the server goes during a statement."""

DATABASE_AWAY = (
    *CONNECTION_LOST,
    asyncpg.OperatorInterventionError,  # shutdowns, restarts, backends that an administrator ends
    asyncpg.InsufficientResourcesError,  # connections, memory, disk
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,  # a standby, until it takes over
    asyncpg.TransactionRollbackError,  # deadlocks, serialisation failures
    asyncpg.LockNotAvailableError,
    asyncpg.InvalidCachedStatementError,  # once, after a migration
)
"""Exceptions of a call that may succeed later without a change: those of the server's state, not of the statement."""

PATIENCE = RetryLimits(DATABASE_AWAY, seconds=30.0, longest_pause=2.0)
"""Limits for statements that may be repeated, and without which the work of a process cannot go on."""

REFUSED = (TypeError, asyncpg.DataError, asyncpg.ProgramLimitExceededError, asyncpg.IntegrityConstraintViolationError)
"""Exceptions of a statement whose values cannot be stored. A call that is repeated raises them again."""

DATABASE_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All exceptions of a call, for work that is given up if it fails."""

NOT_YET = (
    OSError,
    asyncpg.CannotConnectNowError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.TargetServerAttributeNotMatched,  # a standby, until it takes over
)
"""Exceptions of a connection to a server that is just starting."""

CONNECT_SECONDS = 10.0
"""Time in which a host must accept a connection."""

NEXT_HOST_SECONDS = 0.5
"""Time after which the next host of an address is tried as well. A host that is down may not even refuse."""

_STARTING = RetryLimits(NOT_YET, seconds=30.0, longest_pause=0.5)
"""Limits for opening the pool of a server that is just starting."""

_LOST_AFTER = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Seconds, seconds, probes, and milliseconds for data that the peer does not acknowledge."""

_PLANNING = {"jit": "off", "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
"""Every statement looks rows up by index for any parameters, so a session need not plan it each time."""

_YOUNG_SECONDS, _OLD_SECONDS = 0.25, 60.0
"""A session discards its plans at the first age, then whenever it is three times as old, and at the second interval."""

_FIRST_OWN_TYPE = 16_384
"""The lowest object id of a type that a database defines itself."""

_NO_STATEMENT = SimpleNamespace(name="none")  # asyncpg prepares again what an unnamed statement has replaced

IDLE_SECONDS = 0.01

_JSONB_VERSION = b"\x01"


def check_certificates(url: str) -> None:
    """Raises ``ServiceError`` if a file of a TLS connection cannot be read; asyncpg's own error does not name it."""
    options = dict(parse_qsl(urlsplit(url).query))
    for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl"):
        variable = f"PG{name.upper()}"
        path = options.get(name) or os.environ.get(variable)
        if path and not os.access(path, os.R_OK):
            place = f"{name} of the database's address" if name in options else variable
            raise ServiceError(f"{place}: there is no file {path} that may be read; mount it, or correct the path")


async def connect(url: str, *, timeout: float = CONNECT_SECONDS, **options: Any) -> asyncpg.Connection:  # noqa: ASYNC109
    """Connects to the host of an address that accepts writes.

    An address may name several hosts, separated by commas, for example a primary and its standbys. asyncpg tries them
    one after the other, and a host that does not answer uses up the whole time. Here the next host is tried as well
    when one does not answer soon.

    Args:
        timeout: seconds for each host.
        options: further arguments of ``asyncpg.connect``.

    Raises:
        ServiceError: a certificate of the address is missing.
        asyncpg.TargetServerAttributeNotMatched: only standbys answer.
    """
    check_certificates(url)
    options = {"timeout": timeout, **options}
    if "target_session_attrs" not in dict(parse_qsl(urlsplit(url).query)):
        options.setdefault("target_session_attrs", "read-write")
    addresses = host_addresses(url)
    if len(addresses) == 1:
        connection = await asyncpg.connect(url, **options)
    else:
        connection = await _connect_to_first(addresses, options)
    _notice_lost_machines(connection)
    return connection


def host_addresses(url: str) -> list[str]:
    """Returns the address of each host of an address, in their order."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return [url]
    return [urlunsplit(parts._replace(netloc=f"{login}{at}{host}")) for host in hosts.split(",")]


async def _connect_to_first(urls: list[str], options: dict[str, Any]) -> asyncpg.Connection:
    """Returns the first connection to one of several servers; raises the latest failure if all fail."""
    ahead, trying, latest = list(urls), set[asyncio.Task[Any]](), None
    try:
        while ahead or trying:
            if ahead:
                trying.add(asyncio.create_task(asyncpg.connect(ahead.pop(0), **options)))
            seconds = NEXT_HOST_SECONDS if ahead else None
            await asyncio.wait(trying, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for attempt in [one for one in trying if one.done()]:
                trying.discard(attempt)
                latest = attempt.exception()
                if latest is None:
                    return attempt.result()
                if not isinstance(latest, DATABASE_AWAY):  # a wrong password, for example
                    raise latest
    finally:
        for attempt in trying:
            attempt.cancel()
        for left in await asyncio.gather(*trying, return_exceptions=True):
            if isinstance(left, asyncpg.Connection):
                left.terminate()
    assert latest is not None
    raise latest


def _notice_lost_machines(connection: asyncpg.Connection) -> None:
    """Ends a connection half a minute after its peer has vanished without closing it; otherwise it takes hours."""
    used: socket.socket | None = connection._transport.get_extra_info("socket")
    if used is None or used.family not in (socket.AF_INET, socket.AF_INET6):
        return
    used.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOST_AFTER.items():
        if hasattr(socket, name):  # not on every platform
            used.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def prepare_connection(connection: asyncpg.Connection) -> None:
    """Sets the codecs of the event log on a connection."""
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: _JSONB_VERSION + encode_json(value),
        decoder=lambda value: orjson.loads(value[1:]),
        format="binary",
    )


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A session that discards old plans: an index chosen for an empty table may be wrong for a million rows."""

    __slots__ = ("_due", "_opened")

    _described_types: ClassVar[dict[tuple[int, ...], Any]] = {}
    """PostgreSQL's own types, which are the same in every database.

    A new session needs 5 ms of CPU time to describe one, and 40 ms on a busy machine. ``set_type_codec``, which is
    public, takes no arrays.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._opened = time.monotonic()
        self._due = self._opened + _YOUNG_SECONDS

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> Any:  # noqa: ASYNC109
        """Returns the rows that describe types, and the statement that has read them."""
        wanted = tuple(sorted(typeoids))
        rows = self._described_types.get(wanted)
        if rows is not None:
            return rows, _NO_STATEMENT
        description = await super()._introspect_types(wanted, timeout)
        if wanted[-1] < _FIRST_OWN_TYPE:
            self._described_types[wanted] = description[0]
        return description

    async def discard_old_plans(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            await self.execute("DISCARD PLANS")
            self._due = now + min(2 * (now - self._opened), _OLD_SECONDS)


async def _skip_reset(connection: asyncpg.Connection) -> None:
    """Replaces asyncpg's reset, which costs a round trip at every release.

    Statements on the event log leave no settings, locks or listeners in a session. asyncpg ends transactions itself.
    """


async def open_pool(url: str, *, size: int = 8, application: str = "noetl") -> asyncpg.Pool:
    """Opens the pool of a process.

    Raises:
        ServiceError: the server cannot be reached within 30 seconds, it refuses the user or the database, or a
            certificate of the address is missing.
    """

    async def open_() -> asyncpg.Pool:
        return await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=size,
            connect=connect,
            connection_class=_Connection,
            init=prepare_connection,
            setup=lambda connection: connection.discard_old_plans(),
            reset=_skip_reset,
            server_settings={"application_name": application, **_PLANNING},
        )

    try:
        return await with_retries(open_, _STARTING)
    except _STARTING.failures as error:
        raise ServiceError(
            f"the event log does not answer: {error}; check NOETL_DB_URL or run 'noetl-dagster services up'"
        ) from error
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise ServiceError(f"the event log refuses the connection: {error}; check NOETL_DB_URL") from error


class PatientReads:
    """Runs queries that only read, and repeats them while the database is away.

    A driver of executions uses it, so that it outlives a failover. Pages and lists use the pool itself: their readers
    are told at once that the database is away.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        """Returns the rows of a query."""
        return list(await with_retries(partial(self._pool.fetch, query, *values), PATIENCE))

    async def fetchrow(self, query: str, *values: Any) -> Any:
        """Returns the first row of a query, or None."""
        return await with_retries(partial(self._pool.fetchrow, query, *values), PATIENCE)

    async def fetchval(self, query: str, *values: Any) -> Any:
        """Returns the first value of a query."""
        return await with_retries(partial(self._pool.fetchval, query, *values), PATIENCE)


class KeptConnection:
    """Runs small statements, one at a time, on a connection that stays out of the pool between them.

    Acquiring and releasing a connection of asyncpg's pool costs a task and several iterations of the event loop: a
    fifth of the time of a single insert. The connection is released after :data:`IDLE_SECONDS` without use, so there is
    nothing to close, and the pool lacks it only while it works.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._connection: Any = None
        self._busy = False
        self._used = 0.0
        self._releasing: asyncio.Task[None] | None = None

    async def fetchval(self, query: str, *values: Any) -> Any:
        """Returns the first value of a statement; it uses a connection of the pool while this one is busy."""
        rows = await self.fetch(query, *values)
        return rows[0][0] if rows else None

    async def fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        """Returns the rows of a statement, as :meth:`fetchval`."""
        if self._busy:
            return list(await self._pool.fetch(query, *values))
        self._busy = True
        try:
            if self._connection is None:
                self._connection = await self._pool.acquire()
                asyncio.get_running_loop().call_later(IDLE_SECONDS, self._check)
            return list(await self._connection.fetch(query, *values))
        finally:
            self._busy = False
            self._used = asyncio.get_running_loop().time()
            if self._connection is not None and self._is_lost():
                self._release()

    def _is_lost(self) -> bool:
        try:
            return bool(self._connection.is_closed())
        except asyncpg.InterfaceError:  # the pool has taken it back
            return True

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is not None and (self._busy or loop.time() - self._used < IDLE_SECONDS):
            loop.call_later(IDLE_SECONDS, self._check)
        elif self._connection is not None:
            self._release()

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        self._releasing = asyncio.get_running_loop().create_task(self._pool.release(connection))
