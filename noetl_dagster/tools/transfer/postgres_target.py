"""PostgreSQL as a target: in one transaction, or over a stage that outlives a killed process."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.sql.connection import open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.tables import (
    DELETE_ALL_ROWS,
    Table,
    WriteMode,
    describe_table,
    listed,
    upsert_key,
)
from noetl_dagster.tools.transfer.checksum import Checksum, compare_checksums, rows_digest
from noetl_dagster.tools.transfer.chunks import Chunk, Drift, Source
from noetl_dagster.tools.transfer.copying import (
    ORDINAL,
    Copier,
    add_columns,
    base_types,
    checksum_of,
    compare,
    merge,
    move_checked,
)
from noetl_dagster.tools.transfer.options import Options, Place, Resumable, Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

STAGE = "noetl_transfer_stage"
AUTO_BYTES = 256 << 20
"""From this size on a source that can seek is transferred over a stage that outlives the process."""

COMMIT_SECONDS = 0.5
"""So often, where a chunk ends, what is staged is committed with the position behind it."""

PREFIX = "noetl_transfer_"

# quoted identifiers only
CREATE_STAGE = "CREATE {kind} TABLE {stage} {options} AS SELECT {columns} FROM {table} WITH NO DATA"
NUMBER_STAGE = "ALTER TABLE {stage} ADD COLUMN {ordinal} bigserial"
CREATE_POSITION = """
CREATE TABLE {position} (
    rows bigint, after jsonb, columns text[], checksum text, identity text, number int, outcome jsonb
)
"""
SCHEMA_OF = """
SELECT quote_ident(nspname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = to_regclass($1)
"""
NAME_STAGE = "COMMENT ON TABLE {name} IS {text}"
HAS_CHECKSUM = "ALTER TABLE {position} ADD COLUMN IF NOT EXISTS checksum text"
FIRST_POSITION = "INSERT INTO {position} VALUES (0, NULL, '{{}}', '0:0', $1, $2, NULL)"
NOTE = "UPDATE {position} SET rows = $1, after = $2, columns = $3, checksum = $4"
NOTE_OUTCOME = "UPDATE {position} SET outcome = $1"
DROP_BOTH = "DROP TABLE IF EXISTS {stage}, {position}"
MAY_STAGE = "SELECT has_schema_privilege(relnamespace, 'CREATE') FROM pg_class WHERE oid = to_regclass($1)"
SELECT_POSITION = "SELECT rows, after, columns, checksum, identity, number, outcome FROM {position}"
FIT_FOR_KILLS = (
    "SET LOCAL synchronous_commit = off"  # a crash of the server is seen by the count of the stage's rows
)

Chunks = Callable[[AsyncIterator[Chunk]], AsyncIterator[Chunk]]


@dataclass(slots=True)
class Outcome:
    """What was written, for the result."""

    rows: int
    written: int
    checksum: str | None = None
    verified: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, list[str]] = field(default_factory=dict)
    resumed: int | None = None


async def write_postgres(
    place: Place, source: Source, options: Options, call: ToolCall, box: Toolbox, watch: Chunks
) -> Outcome:
    """Writes all rows; the table changes all at once or not at all.

    Raises:
        ToolError: for whatever the server refuses, and where the target did not take what was read.
    """
    own = replace(call, auth=place.auth)
    with postgres_errors(own, box):
        # a source that has a connection of the pool must not wait for another one, as others of its kind do
        lone = isinstance(source, PostgresSource)
        async with open_connection(own, box, lone=lone) as connection:
            if _resumable(options, source, call, box) and (
                options.resumable is Resumable.TRUE
                or await connection.fetchval(MAY_STAGE, sql_identifier(place.table))
            ):
                pool = await open_pool(own, box)
                return await _Staged(place, source, options, call, box, watch, pool).run(connection)
            async with connection.transaction():
                return await _at_once(connection, place, source, options, watch)


async def _at_once(
    connection: asyncpg.Connection, place: Place, source: Source, options: Options, watch: Chunks
) -> Outcome:
    """All in the transaction of the connection."""
    table = await describe_table(connection, place.table)
    drift = Drift(options.on_drift, f"table {table.name}", table.columns)
    if options.mode is WriteMode.REPLACE:
        await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
    staged = options.mode is WriteMode.UPSERT or options.verify is Verify.CHECKSUM
    if not staged:
        copier = Copier(connection, table, drift, source, watch)
        await copier.start()
        while await copier.ready():
            await copier.step()
        if options.verify is not Verify.NONE:
            compare(copier.read, copier.written, table)
        return Outcome(copier.read, copier.written, drift=drift.report())
    keys = upsert_key(table, place.key) if options.mode is WriteMode.UPSERT else ()
    stage = await _make_stage(connection, table, STAGE, numbered=bool(keys), lasting=False)
    copier = Copier(connection, stage, drift, source, watch, checked=options.verify is Verify.CHECKSUM)
    await copier.start()
    while await copier.ready():
        await copier.step()
    return await _finish(connection, table, stage, copier, drift, source, options, keys)


async def _finish(
    connection: asyncpg.Connection,
    table: Table,
    stage: Table,
    copier: Copier,
    drift: Drift,
    source: Source,
    options: Options,
    keys: Sequence[str],
) -> Outcome:
    """Compares what is staged with what was read, and moves it to the table."""
    outcome = Outcome(copier.read, copier.written)
    columns = list(copier.columns)
    if options.verify is not Verify.NONE:
        compare(copier.read, copier.written, stage)
    await add_columns(connection, table, dict(drift.added))
    if options.verify is Verify.CHECKSUM and columns:
        read = await _given(connection, stage, columns, source, copier)
        if keys:
            kept = await checksum_of(connection, stage, columns)
        else:
            kept = await move_checked(connection, stage.name, table, columns)
        compare_checksums(read, kept, f"table {table.name}", kind="db")
        outcome.checksum, outcome.written = str(kept), kept.rows
    if columns and (keys or outcome.checksum is None):
        outcome.written = await merge(connection, stage.name, table, columns, keys)
    if options.verify is not Verify.NONE and options.mode is not WriteMode.UPSERT:
        compare(copier.read, outcome.written, table)
    outcome.drift = drift.report()
    return outcome


async def _make_stage(
    connection: asyncpg.Connection, table: Table, name: str, *, numbered: bool, lasting: bool
) -> Table:
    words = {
        "kind": "UNLOGGED" if lasting else "TEMP",
        "stage": name,
        "options": "" if lasting else "ON COMMIT DROP",
        "columns": listed(table.columns),
        "table": table.name,
    }
    await connection.execute(CREATE_STAGE.format(**words))
    if numbered:
        await connection.execute(NUMBER_STAGE.format(stage=name, ordinal=ORDINAL))
    return Table(name, dict(table.columns), ())


async def _given(
    connection: asyncpg.Connection, stage: Table, columns: Sequence[str], source: Source, copier: Copier
) -> object:
    """The checksum of what was read, with the values that it has in the types of the table."""
    if not isinstance(source, PostgresSource):
        return copier.checksum
    for name, value in (await source.settings()).items():
        await connection.execute("SELECT set_config($1, $2, true)", name, value)
    types = await base_types(connection, stage.name)
    values = {
        name: listed([name])
        if source.columns[name].type == stage.columns[name]
        else f"{listed([name])}::text::{types[name]}"
        for name in columns
    }
    return await source.checksum(rows_digest(values, stage.columns))


def _resumable(options: Options, source: Source, call: ToolCall, box: Toolbox) -> bool:
    if options.resumable is Resumable.FALSE:
        return False
    if options.resumable is Resumable.TRUE and not source.seeks:
        raise ToolError(
            f"transfer in step {call.step}: resumable: true needs a source that can go on in the middle; name "
            "unique columns in source.order_by, or of http write source.paging",
            kind="schema",
        )
    if not call.command_id or box.after is None or not source.seeks:
        return False
    return options.resumable is Resumable.TRUE or source.bytes >= AUTO_BYTES


class _Staged:
    """A transfer that goes on where it was when its command runs again.

    Rows are committed chunk by chunk to a table that is named after the command, with the position of the source in a
    second one; then one transaction moves them to the target, drops the stage, and leaves in the second table what came
    of it, so that a command whose process is killed just then does not transfer again. That one goes when the end of
    the command is in the log.
    """

    def __init__(
        self,
        place: Place,
        source: Source,
        options: Options,
        call: ToolCall,
        box: Toolbox,
        watch: Chunks,
        pool: asyncpg.Pool,
    ) -> None:
        self._place, self._source, self._options, self._call = place, source, options, call
        self._box, self._watch, self._pool = box, watch, pool
        words = [call.execution_id, call.command_id, call.task.name, call.config.get("source"), place.table]
        text = orjson.dumps([*words, options.mode, place.key], default=str, option=orjson.OPT_SORT_KEYS)
        self._names: tuple[str, str] | None = None
        self._digest = hashlib.blake2b(text, digest_size=8).hexdigest()

    async def run(self, connection: asyncpg.Connection) -> Outcome:
        assert self._box.after is not None
        self._box.after(self._call, self._remove)
        table = await describe_table(connection, self._place.table)
        schema = await connection.fetchval(SCHEMA_OF, table.name)
        name = f"{schema}.{PREFIX}{self._digest}"
        self._names = name, f"{name}_position"
        async with _alone(connection, self._digest):
            return await self._run(connection, table, *self._names)

    async def _run(
        self, connection: asyncpg.Connection, table: Table, stage_name: str, position: str
    ) -> Outcome:
        found = await self._found(connection, stage_name, position)
        if found is not None and found["outcome"] is not None:
            return Outcome(**found["outcome"])
        keys = upsert_key(table, self._place.key) if self._options.mode is WriteMode.UPSERT else ()
        if found is None:
            async with connection.transaction():
                await connection.execute(DROP_BOTH.format(stage=stage_name, position=position))
                stage = await _make_stage(connection, table, stage_name, numbered=bool(keys), lasting=True)
                await connection.execute(CREATE_POSITION.format(position=position))
                comment = await connection.fetchval(
                    "SELECT quote_literal($1::text)",
                    f"execution {self._call.execution_id}, command {self._call.command_id}",
                )
                await connection.execute(NAME_STAGE.format(name=stage_name, text=comment))
                identity = await self._source.identity()
                await connection.execute(
                    FIRST_POSITION.format(position=position), identity, self._call.number
                )
        else:
            stage = await describe_table(connection, stage_name)
            stage.columns.pop(ORDINAL, None)
        drift = Drift(self._options.on_drift, f"table {table.name}", stage.columns)
        drift.added = {name: kind for name, kind in stage.columns.items() if name not in table.columns}
        checked = self._options.verify is Verify.CHECKSUM
        copier = Copier(connection, stage, drift, self._source, self._watch, checked=checked)
        resumed = None
        if found is not None:
            await connection.execute(f"UPDATE {position} SET number = $1", self._call.number)
            resumed = copier.read = copier.written = found["rows"]
            copier.columns = dict.fromkeys(found["columns"])
            copier.checksum = Checksum.of_text(found["checksum"])
        async with connection.transaction():
            await copier.start(after=None if found is None else found["after"], resumable=True)
        while await copier.ready():
            async with connection.transaction():
                await connection.execute(FIT_FOR_KILLS)
                after = await copier.step(COMMIT_SECONDS)
                await connection.execute(
                    NOTE.format(position=position),
                    copier.written,
                    after,
                    list(copier.columns),
                    str(copier.checksum),
                )
        async with connection.transaction():
            if self._options.mode is WriteMode.REPLACE:
                await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
            outcome = await _finish(
                connection, table, stage, copier, drift, self._source, self._options, keys
            )
            outcome.resumed = resumed
            await connection.execute(f"DROP TABLE {stage_name}")
            await connection.execute(NOTE_OUTCOME.format(position=position), asdict(outcome))
        return outcome

    async def _found(self, connection: asyncpg.Connection, stage: str, position: str) -> Any:
        """The position of an earlier process, or its outcome; None where the transfer has to begin again."""
        if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", position):
            return None
        await connection.execute(HAS_CHECKSUM.format(position=position))  # as an earlier version makes none
        found = await connection.fetchrow(SELECT_POSITION.format(position=position))
        if found is None or found["outcome"] is not None:
            return found if found is not None and self._call.number <= found["number"] else None
        if found["checksum"] is None or not await connection.fetchval(
            "SELECT to_regclass($1) IS NOT NULL", stage
        ):
            return None
        if found["identity"] != await self._source.identity() or (found["rows"] and found["after"] is None):
            return None
        if found["rows"] != await connection.fetchval(f"SELECT count(*) FROM {stage}"):
            return None  # the server itself went down
        source, after = self._source, found["after"]
        if isinstance(source, PostgresSource) and after and await source.count_until(after) != found["rows"]:
            return None  # other rows than before, or the key is not unique
        return found

    async def _remove(self) -> None:
        """Drops what is left when the command is over.

        Raises:
            ToolError: the server is away or refuses it.
        """
        if self._names is None:
            return
        with postgres_errors(self._call, self._box):
            stage, position = self._names
            await self._pool.execute(DROP_BOTH.format(stage=stage, position=position))


@asynccontextmanager
async def _alone(connection: asyncpg.Connection, digest: str) -> AsyncIterator[None]:
    """Waits until no other process transfers for the same call: one that was taken for dead may still be at it."""
    number = int(digest, 16) - (1 << 63)
    await connection.execute("SELECT pg_advisory_lock($1)", number)
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", number)
