"""Connections to PostgreSQL for a call, and the meaning of the server's errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import asyncpg

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError
from noetl_dagster.storage.exact_json import InexactNumberError
from noetl_dagster.tools.access.credential_types import Credential, CredentialType
from noetl_dagster.tools.base import ToolCall, ToolContext

KINDS: tuple[tuple[str, ErrorKind], ...] = (
    ("08", "db_connection"),
    ("57P", "db_connection"),  # the server is stopping or starting
    ("3D", "db_connection"),  # no such database
    ("53300", "db_connection"),  # too many of them
    ("28", "auth"),
    ("42501", "auth"),
    ("23", "db_constraint"),
    ("40", "db_deadlock"),  # deadlock and serialisation: the transaction has to run again
    ("57014", "db_timeout"),
    ("55P03", "db_timeout"),
    ("25P", "db_timeout"),
)
"""The kinds of errors by the beginning of their SQLSTATE; any other is of kind ``db``."""

# Another try may succeed after a lost connection, a rollback or a lack of resources, or if a lock was not available or
# the server was stopping or starting.
RETRYABLE_CLASSES = ("08", "40", "53")
RETRYABLE_STATES = frozenset({"55P03", "57P01", "57P02", "57P03"})

POSTGRES_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""Errors of the server, of asyncpg and of a connection, timeouts included."""

LOST = "the connection to the server was lost"
_CONNECTION = re.compile("connection|pool is clos", re.IGNORECASE)
_CLOSED = re.compile("connection (is|was|has been) closed|connection_lost|pool is clos")

_CUT_VALUE = re.compile(r"(query argument \$\d+): .*\.\.\. \(", re.DOTALL)
"""The beginning of a bound value, to which asyncpg shortens it: a secret in it would not be recognised."""

CLOSE_SECONDS = 10.0

NEVER_IDLE = "SET LOCAL idle_in_transaction_session_timeout = 0"
"""For a transaction that waits until the consumers of its rows have room."""


async def open_pool(call: ToolCall, context: ToolContext) -> asyncpg.Pool:
    """Returns the pool of the call's postgres credential; raises ``ToolError`` if none is named."""
    return await _connected(call, context, context.clients.postgres)


@contextlib.asynccontextmanager
async def open_connection(call: ToolCall, context: ToolContext, *, lone: bool) -> AsyncIterator[asyncpg.Connection]:
    """Opens a connection with the call's postgres credential.

    Args:
        lone: outside of the pool, for a call that holds it while it waits for others, which may need the pool's.
    """
    if not lone:
        async with (await open_pool(call, context)).acquire() as connection:
            yield connection
        return
    try:
        connection = await _connected(call, context, context.clients.connect_postgres)
    except asyncpg.TooManyConnectionsError as error:
        raise call.error(
            f"the server has no connection left for a call that holds one of its own ({error}); raise its "
            "max_connections, or let fewer such calls run at once",
            "db_connection",
            retryable=True,
            code=error.sqlstate,
            details={"pg": {"sqlstate": error.sqlstate, "code": error.sqlstate}},
        ) from None
    try:
        yield connection
    finally:
        with contextlib.suppress(TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await connection.close(timeout=CLOSE_SECONDS)


async def _connected(call: ToolCall, context: ToolContext, connect: Callable[[Credential], Awaitable[Any]]) -> Any:
    auth = call.auth if call.auth is not None else call.config.get("credential")
    try:
        credential = await context.credentials.resolve(auth, CredentialType.POSTGRES)
        if credential is None:
            raise CredentialError("no credential is named; write auth: <name of a postgres credential>")
        return await connect(credential)
    except CredentialError as error:
        raise call.error(str(error), error.kind, retryable=error.retryable) from None


@contextlib.contextmanager
def postgres_errors(call: ToolCall) -> Iterator[None]:
    """Turns errors of asyncpg, of values that cannot be read, and of the connection into ``ToolError``."""
    try:
        yield
    except asyncpg.InvalidCachedStatementError:
        raise
    except (InexactNumberError, OverflowError) as error:
        why, _, _ = str(error).partition(";")
        what = f"a column has a value that cannot be read unchanged: {why}; cast the column to text in SQL"
        raise call.error(what, "transform") from None
    except POSTGRES_ERRORS as error:
        raise postgres_error(f"postgres in step {call.step}", error) from None


def postgres_error(where: str, error: Exception) -> ToolError:
    """Returns the server's message with its SQLSTATE, detail and hint; or what happened to the connection.

    Args:
        error: one of :data:`POSTGRES_ERRORS`.
    """
    if not isinstance(error, asyncpg.PostgresError):
        what, kind = _connection_error(error)
        return ToolError(f"{where}: {what}", kind=kind, retryable=kind != "db", details={"pg": {"sqlstate": None}})
    state = error.sqlstate or ""
    parts = [str(error.args[0]) if error.args else type(error).__name__]
    if isinstance(error, asyncpg.ConnectionDoesNotExistError):
        parts = [LOST]
    parts += [f"{name}: {text}" for name in ("detail", "hint") if (text := getattr(error, name, None))]
    return ToolError(
        f"{where}: {'; '.join(parts)} (SQLSTATE {state})",
        kind=kind_of_state(state),
        retryable=state.startswith(RETRYABLE_CLASSES) or state in RETRYABLE_STATES,
        code=state,
        details={"pg": {"sqlstate": state, "code": state}},
    )


def _connection_error(error: Exception) -> tuple[str, ErrorKind]:
    """Returns in plain words what happened to a connection, and the kind of error; ``db`` for a wrong use of it."""
    text = _CUT_VALUE.sub(r"\1: a long value (", f"{type(error).__name__}: {error}")
    if isinstance(error, TimeoutError):
        return "the server did not answer in time", "db_timeout"
    if isinstance(error, asyncpg.InterfaceError) and not _CONNECTION.search(text):
        return text, "db"
    if _CLOSED.search(text) or isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return LOST, "db_connection"
    if isinstance(error, OSError):
        return f"the server cannot be reached ({text})", "db_connection"
    return text, "db_connection"


def kind_of_state(sqlstate: str) -> ErrorKind:
    """Returns the kind of error of a SQLSTATE."""
    return next((kind for start, kind in KINDS if sqlstate.startswith(start)), "db")
