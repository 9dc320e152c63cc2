"""PostgreSQL as a target: in one transaction, or staged in tables that outlive a killed process."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.sql.connection import open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.tables import (
    DELETE_ALL_ROWS,
    SqlTable,
    WriteMode,
    describe_table,
    listed,
    upsert_key,
)
from noetl_dagster.tools.transfer.checksum import Checksum, compare_checksums, rows_digest
from noetl_dagster.tools.transfer.chunks import Drift, Transfer, TransferOutcome
from noetl_dagster.tools.transfer.copying import (
    ORDINAL,
    Copier,
    add_columns,
    base_types,
    checksum_of,
    compare_counts,
    merge,
    move_checked,
)
from noetl_dagster.tools.transfer.options import Resumable, Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

STAGE = "noetl_transfer_stage"
AUTO_BYTES = 256 << 20
"""A source that can resume is staged automatically from this size on."""

COMMIT_SECONDS = 0.5
"""Staged rows are committed with their position at the end of a chunk, at most this often."""

PREFIX = "noetl_transfer_"

# quoted identifiers only
CREATE_STAGE = "CREATE {kind} TABLE {stage} {options} AS SELECT {columns} FROM {table} WITH NO DATA"
NUMBER_STAGE = "ALTER TABLE {stage} ADD COLUMN {ordinal} bigserial"
CREATE_POSITION = """
CREATE TABLE {position} (
    rows bigint, after jsonb, columns text[], checksum text, identity text, ended int, outcome jsonb
)
"""
SCHEMA_OF = """
SELECT quote_ident(nspname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = to_regclass($1)
"""
NAME_STAGE = "COMMENT ON TABLE {name} IS {text}"
FIRST_POSITION = "INSERT INTO {position} VALUES (0, NULL, '{{}}', '0:0', $1, $2, $3)"
RECORD_POSITION = "UPDATE {position} SET rows = $1, after = $2, columns = $3, checksum = $4"
RECORD_OUTCOME = "UPDATE {position} SET ended = $1, outcome = $2"
DROP_BOTH = "DROP TABLE IF EXISTS {stage}, {position}"
MAY_STAGE = "SELECT has_schema_privilege(relnamespace, 'CREATE') FROM pg_class WHERE oid = to_regclass($1)"
SELECT_POSITION = "SELECT rows, after, columns, checksum, identity, ended, outcome FROM {position}"
ASYNCHRONOUS_COMMIT = "SET LOCAL synchronous_commit = off"  # after a crash the stage's rows are counted


async def write_postgres(transfer: Transfer) -> TransferOutcome:
    """Writes all rows; the table changes all at once or not at all.

    Raises:
        ToolError: the server refuses a statement, or the target did not take the rows that were read.
    """
    own = replace(transfer.call, auth=transfer.target.auth)
    box, options = transfer.box, transfer.options
    with postgres_errors(own, box):
        # a source that has a connection of the pool must not wait for another one, as others of its kind do
        lone = isinstance(transfer.source, PostgresSource)
        async with open_connection(own, box, lone=lone) as connection:
            if _resumable(transfer) and (
                options.resumable is Resumable.TRUE
                or await connection.fetchval(MAY_STAGE, sql_identifier(transfer.target.table))
            ):
                target = StagedTable(transfer, connection, await open_pool(own, box))
                assert box.after is not None
                box.after(transfer.call, target.discard)
                async with target.begun() as outcome:
                    if outcome is not None:
                        return outcome
                    await target.stage()
                    return await target.publish()
            async with connection.transaction():
                return await _in_one_transaction(connection, transfer)


def _resumable(transfer: Transfer) -> bool:
    call, source, resumable = transfer.call, transfer.source, transfer.options.resumable
    if resumable is Resumable.FALSE:
        return False
    if resumable is Resumable.TRUE and not source.seeks:
        raise ToolError(
            f"transfer in step {call.step}: resumable: true needs a source that can go on in the middle; name "
            "unique columns in source.order_by, or of http write source.paging",
            kind="schema",
        )
    if not call.command_id or transfer.box.after is None or not source.seeks:
        return False
    return resumable is Resumable.TRUE or source.bytes >= AUTO_BYTES


async def _in_one_transaction(connection: asyncpg.Connection, transfer: Transfer) -> TransferOutcome:
    options = transfer.options
    table = await describe_table(connection, transfer.target.table)
    drift = Drift(options.on_drift, f"table {table.name}", table.columns)
    if options.mode is WriteMode.REPLACE:
        await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
    staged = options.mode is WriteMode.UPSERT or options.verify is Verify.CHECKSUM
    into = table
    if staged:
        into = await _make_stage(connection, transfer, table, STAGE, lasting=False)
    copier = Copier(connection, into, drift, transfer)
    await copier.start()
    while await copier.ready():
        await copier.step()
    if staged:
        return await _move(connection, table, into, copier, drift, transfer)
    if options.verify is not Verify.NONE:
        compare_counts(copier.read, copier.written, table)
    return TransferOutcome(copier.read, copier.written, drift=drift.report())


async def _make_stage(
    connection: asyncpg.Connection, transfer: Transfer, table: SqlTable, name: str, *, lasting: bool
) -> SqlTable:
    words = {
        "kind": "UNLOGGED" if lasting else "TEMP",
        "stage": name,
        "options": "" if lasting else "ON COMMIT DROP",
        "columns": listed(table.columns),
        "table": table.name,
    }
    await connection.execute(CREATE_STAGE.format(**words))
    if _keys(transfer, table):
        await connection.execute(NUMBER_STAGE.format(stage=name, ordinal=ORDINAL))
    return SqlTable(name, dict(table.columns), ())


def _keys(transfer: Transfer, table: SqlTable) -> Sequence[str]:
    return upsert_key(table, transfer.target.key) if transfer.options.mode is WriteMode.UPSERT else ()


async def _move(
    connection: asyncpg.Connection,
    table: SqlTable,
    stage: SqlTable,
    copier: Copier,
    drift: Drift,
    transfer: Transfer,
) -> TransferOutcome:
    """Compares the staged rows with those that were read, and moves them to the table."""
    options, keys = transfer.options, _keys(transfer, table)
    outcome = TransferOutcome(copier.read, copier.written)
    columns = list(copier.columns)
    if options.verify is not Verify.NONE:
        compare_counts(copier.read, copier.written, stage)
    await add_columns(connection, table, dict(drift.added))
    if options.verify is Verify.CHECKSUM and columns:
        read = await _checksum_read(connection, stage, columns, transfer, copier)
        if keys:
            kept = await checksum_of(connection, stage, columns)
        else:
            kept = await move_checked(connection, stage.name, table, columns)
        compare_checksums(read, kept, f"table {table.name}", kind="db")
        outcome.checksum, outcome.written = str(kept), kept.rows
    if columns and (keys or outcome.checksum is None):
        outcome.written = await merge(connection, stage.name, table, columns, keys)
    if options.verify is not Verify.NONE and options.mode is not WriteMode.UPSERT:
        compare_counts(copier.read, outcome.written, table)
    outcome.drift = drift.report()
    return outcome


async def _checksum_read(
    connection: asyncpg.Connection,
    stage: SqlTable,
    columns: Sequence[str],
    transfer: Transfer,
    copier: Copier,
) -> object:
    """Returns the checksum of the rows that were read, with their values in the types of the table."""
    source = transfer.source
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


class StagedTable:
    """A :class:`~noetl_dagster.tools.transfer.chunks.StagedTarget` in the schema of the table.

    Rows are committed chunk by chunk to a table that is named after the command, with the position of the source in a
    second table. One transaction then moves the rows to the target, drops the stage, and records the outcome beside
    the position, for a command whose process is killed just then. All calls of the command's task share these tables:
    ``ended`` is the number of the last call that has published, so that an earlier one does not resume the rows of a
    later one when the command runs again.
    """

    def __init__(self, transfer: Transfer, connection: asyncpg.Connection, pool: asyncpg.Pool) -> None:
        self._transfer, self._connection, self._pool = transfer, connection, pool
        call, target = transfer.call, transfer.target
        words = [call.execution_id, call.command_id, call.task.name, call.config.get("source"), target.table]
        text = orjson.dumps(
            [*words, transfer.options.mode, target.key], default=str, option=orjson.OPT_SORT_KEYS
        )
        self._digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._names: dict[str, str] = {}
        self._table: SqlTable
        self._stage: SqlTable
        self._found: Any = None
        self._drift: Drift
        self._copier: Copier
        self._resumed: int | None = None

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[TransferOutcome | None]:
        """Finds or creates the staging; yields the outcome if an earlier process has published this call.

        Waits until no other process transfers for the same command: one that is assumed dead may still run.
        """
        connection, transfer = self._connection, self._transfer
        self._table = await describe_table(connection, transfer.target.table)
        schema = await connection.fetchval(SCHEMA_OF, self._table.name)
        name = f"{schema}.{PREFIX}{self._digest}"
        self._names = {"stage": name, "position": f"{name}_position"}
        lock = int(self._digest, 16) - (1 << 63)
        await connection.execute("SELECT pg_advisory_lock($1)", lock)
        try:
            position = await self._position()
            if position is not None and position["outcome"] and transfer.call.number <= position["ended"]:
                yield TransferOutcome(**position["outcome"])
                return
            self._found = position if await self._fits(position) else None
            if self._found is None:
                async with connection.transaction():
                    await self._create(position)
            else:
                self._stage = await describe_table(connection, name)
                self._stage.columns.pop(ORDINAL, None)
            yield None
        finally:
            if not connection.is_closed():
                await connection.execute("SELECT pg_advisory_unlock($1)", lock)

    async def _position(self) -> Any:
        if not await self._exists("position"):
            return None
        return await self._connection.fetchrow(SELECT_POSITION.format(**self._names))

    async def _exists(self, name: str) -> bool:
        return bool(await self._connection.fetchval("SELECT to_regclass($1) IS NOT NULL", self._names[name]))

    async def _fits(self, position: Any) -> bool:
        """Returns whether the staging is complete up to its position, and the source the same as then."""
        source = self._transfer.source
        if position is None or not await self._exists("stage"):
            return False
        if position["identity"] != await source.identity() or (
            position["rows"] and position["after"] is None
        ):
            return False
        if position["rows"] != await self._connection.fetchval(
            "SELECT count(*) FROM {stage}".format(**self._names)
        ):
            return False  # the server itself has crashed
        if not isinstance(source, PostgresSource) or not position["after"]:
            return True
        # else the rows have changed, or the key is not unique
        return bool(await source.count_until(position["after"]) == position["rows"])

    async def _create(self, before: Any) -> None:
        """Creates an empty staging, which keeps the outcome of an earlier call of the command."""
        connection, call = self._connection, self._transfer.call
        await connection.execute(DROP_BOTH.format(**self._names))
        self._stage = await _make_stage(
            connection, self._transfer, self._table, self._names["stage"], lasting=True
        )
        await connection.execute(CREATE_POSITION.format(**self._names))
        comment = await connection.fetchval(
            "SELECT quote_literal($1::text)", f"execution {call.execution_id}, command {call.command_id}"
        )
        await connection.execute(NAME_STAGE.format(name=self._names["stage"], text=comment))
        ended, outcome = (0, None) if before is None else (before["ended"], before["outcome"])
        identity = await self._transfer.source.identity()
        await connection.execute(FIRST_POSITION.format(**self._names), identity, ended, outcome)

    async def stage(self) -> None:
        """Commits the rows after the position, chunk by chunk."""
        connection, table, stage, found = self._connection, self._table, self._stage, self._found
        self._drift = Drift(self._transfer.options.on_drift, f"table {table.name}", stage.columns)
        self._drift.added = {name: kind for name, kind in stage.columns.items() if name not in table.columns}
        copier = self._copier = Copier(connection, stage, self._drift, self._transfer)
        if found is not None:
            self._resumed = copier.read = copier.written = found["rows"]
            copier.columns = dict.fromkeys(found["columns"])
            copier.checksum = Checksum.of_text(found["checksum"])
        async with connection.transaction():
            await copier.start(after=None if found is None else found["after"], resumable=True)
        while await copier.ready():
            async with connection.transaction():
                await connection.execute(ASYNCHRONOUS_COMMIT)
                after = await copier.step(COMMIT_SECONDS)
                position = copier.written, after, list(copier.columns), str(copier.checksum)
                await connection.execute(RECORD_POSITION.format(**self._names), *position)

    async def publish(self) -> TransferOutcome:
        """Moves the rows to the table, and records the outcome."""
        connection, table = self._connection, self._table
        async with connection.transaction():
            if self._transfer.options.mode is WriteMode.REPLACE:
                await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
            outcome = await _move(connection, table, self._stage, self._copier, self._drift, self._transfer)
            outcome.resumed = self._resumed
            await connection.execute("DROP TABLE {stage}".format(**self._names))
            await connection.execute(
                RECORD_OUTCOME.format(**self._names), self._transfer.call.number, asdict(outcome)
            )
        return outcome

    async def discard(self) -> None:
        """Drops both tables when the end of the command is in the log."""
        if self._names:
            with postgres_errors(self._transfer.call, self._transfer.box):
                await self._pool.execute(DROP_BOTH.format(**self._names))
