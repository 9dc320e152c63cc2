"""Parts as rows of a table of SQLite or MySQL: tried and staged beside it, moved into it in one transaction.

The tables ``noetl_sink_staged`` and ``noetl_sink_part`` are in the target's own database. A part that arrives late,
from a worker that was assumed dead, is not published again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.rows.batches import batches_of
from noetl_dagster.tools.sinks.place import PartPlace, SinkKind
from noetl_dagster.tools.sql.databases.base import DatabaseSession, open_session
from noetl_dagster.tools.sql.databases.tool import find_database
from noetl_dagster.tools.sql.databases.writing import TableWriter, create_bookkeeping
from noetl_dagster.tools.sql.tables import WriteMode, drift_of_sink
from noetl_dagster.values import admit

T = TypeVar("T")

TRIES = 3
"""How often a change is made whose transaction the database undid for another one."""

BATCH_ROWS = 1_000  # of a staged row, at most
NAMES_AT_ONCE = 500

# ? is a placeholder
BOOKKEEPING = (
    "CREATE TABLE IF NOT EXISTS noetl_sink_staged (target VARCHAR(255) NOT NULL, part VARCHAR(255) NOT NULL, "
    "batch INT NOT NULL, part_rows {text} NOT NULL, PRIMARY KEY (target, part, batch))",
    "CREATE TABLE IF NOT EXISTS noetl_sink_part (target VARCHAR(255) NOT NULL, part VARCHAR(255) NOT NULL, "
    "published TIMESTAMP DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (target, part))",
)
STAGE = "INSERT INTO noetl_sink_staged (target, part, batch, part_rows) VALUES (?, ?, ?, ?)"
STAGED = "SELECT part_rows FROM noetl_sink_staged WHERE target = ? AND part = ? ORDER BY batch"
PARTS = "SELECT DISTINCT part FROM noetl_sink_staged WHERE target = ?"
FORGET = "DELETE FROM noetl_sink_staged WHERE target = ? AND part = ?"
NOTE_PUBLISHED = "noetl_sink_part (target, part) VALUES (?, ?)"
PUBLISHED = "SELECT part FROM noetl_sink_part WHERE target = ? AND part IN ({places})"


class DatabaseParts:
    """A :class:`~noetl_dagster.tools.sinks.place.PartTarget` in SQLite or MySQL."""

    def __init__(self, context: ToolContext) -> None:
        self._tool_context = context

    async def stage(self, place: PartPlace, result: Any) -> None:
        """Inserts the rows, so that the database checks them, undoes that, and stages them as JSON."""

        async def work(session: DatabaseSession) -> None:
            if await session.run(_published, session, place, [place.part]):
                return
            writer = await session.run(TableWriter, session, place.table)
            await session.run(session.fetch, FORGET, place.table, place.part)
            await session.run(session.fetch, "SAVEPOINT noetl_tried")
            await session.run(_delete_replaced, writer, place)
            staged: list[bytes] = []
            async for rows in batches_of(result):
                for start in range(0, len(rows), BATCH_ROWS):
                    some = [_json_row(row, place, writer) for row in rows[start : start + BATCH_ROWS]]
                    await session.run(_insert, writer, place, some)
                    staged.append(orjson.dumps(some))
            await session.run(session.fetch, "ROLLBACK TO SAVEPOINT noetl_tried")
            for number, text in enumerate(staged):
                await session.run(session.fetch, STAGE, place.table, place.part, number, text.decode())

        await self._change(place, work)

    async def publish(self, target: PartPlace, parts: Collection[PartPlace]) -> None:
        """Moves parts into the table; a part that was published before is left as it is."""
        await self._change(target, lambda session: session.run(_publish, session, parts))

    async def staged(self, target: PartPlace, prefix: str) -> set[str]:
        """Returns the names of staged parts with a prefix."""
        rows = await self._change(target, lambda session: session.run(session.fetch, PARTS, target.table))
        return {part for (part,) in rows if part.startswith(prefix)}

    async def missing(self, target: PartPlace, parts: Collection[PartPlace]) -> list[str]:
        """Returns the names of parts that are not recorded as published."""
        names = [place.part for place in parts]
        if not names:
            return []
        published = await self._change(target, lambda session: session.run(_published, session, target, names))
        return [name for name in names if name not in published]

    async def discard(self, target: PartPlace, names: Collection[str]) -> None:
        """Deletes staged parts."""

        def forget(session: DatabaseSession) -> None:
            for name in names:
                session.fetch(FORGET, target.table, name)

        await self._change(target, lambda session: session.run(forget, session))

    async def _change(self, place: PartPlace, work: Callable[[DatabaseSession], Awaitable[T]]) -> T:
        """Makes a change in one transaction; raises ``ToolError`` if nothing was changed."""
        database = await find_database(place.kind.value, self._tool_context, auth=place.auth, path=place.path or None)
        where = f"sink: table {place.table} of {place.kind} {place.path or place.auth}"
        text = "LONGTEXT" if place.kind is SinkKind.MYSQL else "TEXT"
        tables = [statement.format(text=text) for statement in BOOKKEEPING]
        left = TRIES
        while True:
            left -= 1
            try:
                async with open_session(database, where) as session:
                    await session.run(database.prepare_writing, session.connection)
                    await session.run(create_bookkeeping, session, tables, "a sink")
                    async with session.transaction():
                        return await work(session)
            except ToolError as error:
                if error.kind != "db_deadlock" or not left:
                    raise
            await asyncio.sleep(0)


def _json_row(row: Mapping[str, Any], place: PartPlace, writer: TableWriter) -> dict[str, Any]:
    """Returns a row with the columns of its iteration that the table has, as JSON values."""
    columns = {name.casefold() for name in row}
    own = {
        name: value for name, value in place.own.items() if name in writer.columns and name.casefold() not in columns
    }
    return {name: admit(value, "a row") for name, value in {**own, **row}.items()}


def _insert(writer: TableWriter, place: PartPlace, rows: Sequence[Mapping[str, Any]]) -> None:
    names = writer.spelled(dict.fromkeys(name for row in rows for name in row))
    drift = drift_of_sink(place.on_new_column, writer.where, writer.columns)
    columns, new = drift.sort(list(names), str)
    if new:
        text = f"on_new_column: add is not for {place.kind}; write ignore or fail, or add the column yourself"
        raise ToolError(text, kind="schema")
    writer.insert(rows, {name: names[name] for name in columns}, place.key if place.mode is WriteMode.UPSERT else ())


def _delete_replaced(writer: TableWriter, place: PartPlace) -> None:
    """Deletes the rows that a part replaces: those of its iteration, or all."""
    if place.mode is WriteMode.REPLACE:
        writer.delete({name: value for name, value in place.own.items() if name in writer.columns})


def _publish(session: DatabaseSession, parts: Collection[PartPlace]) -> None:
    writer: TableWriter | None = None
    note = f"{session.database.insert_new} {NOTE_PUBLISHED}"
    for place in parts:
        staged = session.fetch(STAGED, place.table, place.part)
        # another process that publishes the same part waits for its key here
        if staged and session.change(note, place.table, place.part):
            writer = writer or TableWriter(session, place.table)
            _delete_replaced(writer, place)
            for (text,) in staged:
                _insert(writer, place, orjson.loads(text))
        session.fetch(FORGET, place.table, place.part)


def _published(session: DatabaseSession, target: PartPlace, names: Sequence[str]) -> set[str]:
    published: set[str] = set()
    for start in range(0, len(names), NAMES_AT_ONCE):
        some = names[start : start + NAMES_AT_ONCE]
        query = PUBLISHED.format(places=", ".join("?" * len(some)))
        published.update(part for (part,) in session.fetch(query, target.table, *some))
    return published
