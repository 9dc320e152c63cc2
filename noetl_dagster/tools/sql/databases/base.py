"""The contract of a database behind DB-API, and how its calls run: in a thread, interrupted when they are cancelled."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import orjson

from noetl_dagster.errors import ErrorKind, ToolError
from noetl_dagster.storage.exact_json import Numbers
from noetl_dagster.tools.rows.columns import Convert, converted, row_value
from noetl_dagster.tools.sql.fetching import FETCHED, interruptible
from noetl_dagster.values import admit

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """The meaning of a driver's error. ``code`` is the database's own; None if it has none."""

    kind: ErrorKind
    code: str | None = None
    retryable: bool = False


class Database(ABC):
    """A database of one kind at one place.

    Attributes:
        dialect: its name in sqlglot.
        placeholder: of a parameter.
        mark: the quote of identifiers.
        errors: exceptions of the driver.
        simple_types: of parameters that the driver takes as they are.
        commits_one: a call's one statement runs without a transaction around it.
        same: the operator that compares two values, which may be null.
        insert_new: the beginning of an ``INSERT`` that leaves rows with the same key as they are.
    """

    dialect: ClassVar[str]
    placeholder: ClassVar[str]
    mark: ClassVar[str] = '"'
    errors: ClassVar[tuple[type[Exception], ...]]
    simple_types: ClassVar[tuple[type[Any], ...]]

    @abstractmethod
    def connect(self) -> Any:
        """Returns a connection of DB-API, outside of a transaction."""

    @abstractmethod
    def begin(self, connection: Any, *, reads: bool) -> None:
        """Begins a transaction; ``reads``: it changes nothing."""

    def commit(self, connection: Any) -> None:
        """Commits the transaction."""
        connection.commit()

    def affected(self, columns: Sequence[str], fetch: Callable[[], Sequence[Sequence[Any]]]) -> int | None:
        """Returns the number of changed rows, if the columns of a statement only report it."""
        return None

    @abstractmethod
    def interrupt(self, connection: Any) -> None:
        """Stops the statement that another thread runs."""

    commits_one: ClassVar[bool] = False
    same: ClassVar[str] = "IS NOT DISTINCT FROM"
    insert_new: ClassVar[str] = "INSERT INTO"

    def prepare_writing(self, connection: Any) -> None:  # noqa: B027
        """Makes a connection refuse values that do not fit, and write instants in UTC."""

    def check_table(self, connection: Any, table: str) -> None:  # noqa: B027
        """Raises ``ToolError`` if changes of a table cannot be undone."""

    def written(self, value: Any, type_code: Any) -> Any:
        """Returns a value for a column, whose type is that of the driver's description."""
        return self.value(value)

    @abstractmethod
    def upsert(self, keys: Sequence[str], columns: Sequence[str]) -> str:
        """Returns the end of an ``INSERT`` that updates the rows that are there."""

    @abstractmethod
    def failure(self, error: BaseException) -> Failure:
        """Returns the meaning of an error of the driver."""

    def cursor(self, connection: Any) -> Any:
        """Returns a cursor that fetches rows as they are needed."""
        return connection.cursor()

    def close(self, connection: Any) -> None:
        """Closes a connection; what is not committed is undone."""
        connection.close()

    def value(self, value: Any) -> Any:
        """Returns a parameter as the driver takes it: JSON for lists and mappings, and text for most other types."""
        if value is None or isinstance(value, self.simple_types):
            return value
        plain = admit(value, "a parameter")
        return orjson.dumps(plain).decode() if isinstance(plain, list | dict) else plain

    def rows(self, cursor: Any, numbers: Numbers) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of a cursor with JSON values; raises ``ToolError`` if a value has none."""
        columns = [(column[0], self.converter(column, numbers)) for column in cursor.description]
        count = 0
        while batch := cursor.fetchmany(FETCHED):
            values = [
                converted(name, column, convert, count)
                for (name, convert), column in zip(columns, zip(*batch, strict=True), strict=True)
            ]
            yield [dict(zip((name for name, _ in columns), row, strict=True)) for row in zip(*values, strict=True)]
            count += len(batch)

    def converter(self, column: Sequence[Any], numbers: Numbers) -> Convert:
        """Returns the function that converts the values of a column, by the driver's description, to JSON."""
        return row_value

    def tables(self, cursor: Any, size: int) -> Iterator[pa.Table]:
        """Yields the rows of a cursor as Arrow tables of at most ``size`` rows."""
        from noetl_dagster.tools.rows.arrow import arrow_table  # imports Arrow, which only tables need

        names, schema, count = [column[0] for column in cursor.description], None, 0
        while batch := cursor.fetchmany(size):
            rows = [dict(zip(names, row, strict=True)) for row in batch]
            table = arrow_table(rows, schema, self.arrow_types(cursor.description), count)
            schema = table.schema
            count += len(batch)
            yield table

    def arrow_types(self, description: Sequence[Sequence[Any]]) -> dict[str, pa.DataType]:
        """Returns the Arrow types of the columns whose values do not decide."""
        return {}

    def quoted(self, name: str) -> str:
        """Returns a name, which may have a schema before a dot, as quoted identifiers."""
        return ".".join(map(self.quoted_part, name.split(".")))

    def quoted_part(self, name: str) -> str:
        """Returns one name as a quoted identifier; a dot in it is part of the name."""
        return self.mark + name.replace(self.mark, 2 * self.mark) + self.mark

    def execute(self, connection: Any, text: str, values: Sequence[Any] = ()) -> Any:
        """Runs a statement; returns its cursor."""
        cursor = self.cursor(connection)
        cursor.execute(text, tuple(map(self.value, values)) if values else None)
        return cursor

    @contextmanager
    def transaction(self, connection: Any, *, reads: bool = False) -> Iterator[None]:
        """Commits at the end of the block; an exception undoes it."""
        self.begin(connection, reads=reads)
        try:
            yield
        except BaseException:
            self.undo(connection)
            raise
        self.commit(connection)

    def undo(self, connection: Any) -> None:
        """Rolls back after an error, also of a connection that is lost."""
        with self.ignored():
            connection.rollback()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignores errors of the driver, after another one."""
        try:
            yield
        except OSError:
            pass
        except self.errors:
            pass

    @contextmanager
    def failures(self, where: str) -> Iterator[None]:
        """Turns errors of the driver into ``ToolError``."""
        try:
            yield
        except self.errors as error:
            failure = self.failure(error)
            raise ToolError(
                f"{where}: {self.text(error)}", kind=failure.kind, code=failure.code, retryable=failure.retryable
            ) from None
        except OSError as error:
            raise ToolError(f"{where}: {type(error).__name__}: {error}", kind="db_connection", retryable=True) from None

    def text(self, error: BaseException) -> str:
        """Returns the message of an error."""
        return f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class DatabaseSession:
    """An open connection, whose statements run in threads, one at a time. ``where`` begins the texts of errors."""

    database: Database
    connection: Any
    where: str

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work in a thread; a cancellation interrupts its statement, and waits for its end.

        Raises:
            ToolError: the driver's error, with its kind.
        """
        with self.database.failures(self.where):
            job = asyncio.to_thread(work, *arguments)
            return await interruptible(job, partial(self.database.interrupt, self.connection))

    def fetch(self, text: str, *values: Any) -> list[Any]:
        """Returns the rows of a statement of the platform, whose placeholders are ``?``; in the thread of ``run``."""
        placed = text.replace("?", self.database.placeholder)
        cursor = self.database.execute(self.connection, placed, values)
        return list(cursor.fetchall()) if cursor.description else []

    def change(self, text: str, *values: Any) -> int:
        """Runs a statement as :meth:`fetch` does; returns the number of rows that it changed."""
        placed = text.replace("?", self.database.placeholder)
        return int(self.database.execute(self.connection, placed, values).rowcount)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commits the changes of the block; after an exception the end of the connection undoes them."""
        await self.run(partial(self.database.begin, self.connection, reads=False))
        yield
        await self.run(self.database.commit, self.connection)


@asynccontextmanager
async def open_session(database: Database, where: str) -> AsyncIterator[DatabaseSession]:
    """Opens a connection.

    Args:
        where: the tool and step, for errors.

    Raises:
        ToolError: the driver's error, with its kind.
    """
    connecting = asyncio.ensure_future(asyncio.to_thread(database.connect))
    try:
        with database.failures(where):
            connection = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(partial(_close_late, database))
        raise
    try:
        yield DatabaseSession(database, connection, where)
    finally:
        with database.ignored():
            await asyncio.to_thread(database.close, connection)


def _close_late(database: Database, connecting: asyncio.Future[Any]) -> None:
    """Closes a connection that was opened for a call that is cancelled."""
    if not connecting.cancelled() and connecting.exception() is None:
        with database.ignored():
            database.close(connecting.result())
