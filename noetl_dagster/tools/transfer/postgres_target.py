"""PostgreSQL as a target: in one transaction, or staged in tables that outlive a killed process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg

from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.sql.connection import open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.tables import DELETE_ALL_ROWS, Drift, SqlTable, WriteMode, describe_table, listed
from noetl_dagster.tools.transfer import staging
from noetl_dagster.tools.transfer.checksum import Checksum
from noetl_dagster.tools.transfer.chunks import Transfer, TransferOutcome
from noetl_dagster.tools.transfer.copying import ORDINAL, Copier, compare_counts, upsert_keys
from noetl_dagster.tools.transfer.options import Resumable, Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource
from noetl_dagster.tools.transfer.staging import (
    AUTO_BYTES,
    StagedTable,
    TablePosition,
    can_resume,
    refuse_if_over,
)

STAGE = "noetl_transfer_stage"
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
FIRST_POSITION = "INSERT INTO {position} DEFAULT VALUES"
RECORD_POSITION = """
UPDATE {position} SET rows = $1, after = $2, columns = $3, checksum = $4, identity = $5, ended = $6, outcome = $7
"""
DROP_BOTH = "DROP TABLE IF EXISTS {stage}, {position}"
MAY_STAGE = "SELECT has_schema_privilege(relnamespace, 'CREATE') FROM pg_class WHERE oid = to_regclass($1)"
SELECT_POSITION = "SELECT rows, after, columns, checksum, identity, ended, outcome FROM {position}"
ASYNCHRONOUS_COMMIT = "SET LOCAL synchronous_commit = off"  # after a crash the stage's rows are counted


async def write_postgres(transfer: Transfer) -> TransferOutcome:
    """Writes all rows; the table changes all at once or not at all.

    A command that is killed and runs again finds what it had written, if the role may create tables beside the target.

    Raises:
        ToolError: the server refuses a statement, or the target did not take the rows that were read.
    """
    own = replace(transfer.call, auth=transfer.target.auth)
    context, source, options = transfer.tool_context, transfer.source, transfer.options
    with postgres_errors(own):
        # a source that has a connection of the pool must not wait for another one, as others of its kind do
        async with open_connection(own, context, lone=isinstance(source, PostgresSource)) as connection:
            resumes = can_resume(transfer, seeks=source.seeks)
            wanted = resumes and options.resumable is Resumable.TRUE
            table = sql_identifier(transfer.target.table)
            if wanted or await connection.fetchval(MAY_STAGE, table):
                lasting = wanted or (resumes and source.bytes >= AUTO_BYTES)
                target = PostgresTable(transfer, connection, await open_pool(own, context), lasting=lasting)
                context.after(transfer.call, target.discard)
                return await target.run()
            async with connection.transaction():
                outcome = await _in_one_transaction(connection, transfer)
                await refuse_if_over(transfer)
                return outcome


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
        return await copier.move(table)
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
    if upsert_keys(transfer, table):
        await connection.execute(NUMBER_STAGE.format(stage=name, ordinal=ORDINAL))
    return SqlTable(name, dict(table.columns), ())


class PostgresTable(StagedTable):
    """Stages the rows of a table in its schema.

    Rows are committed chunk by chunk to a table that is named after the command; the position is in a second table.
    One transaction then moves the rows to the target, drops the stage, and records the outcome beside the position,
    for a command whose process is killed just then. All calls of the command's task share these tables.
    """

    def __init__(
        self, transfer: Transfer, connection: asyncpg.Connection, pool: asyncpg.Pool, *, lasting: bool
    ) -> None:
        super().__init__(transfer, lasting=lasting)
        self._connection, self._pool = connection, pool
        self._names: dict[str, str] = {}
        self._table: SqlTable
        self._stage: SqlTable
        self._copier: Copier

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        connection = self._connection
        self._table = await describe_table(connection, self._transfer.target.table)
        schema = await connection.fetchval(SCHEMA_OF, self._table.name)
        name = f"{schema}.{PREFIX}{self._digest}"
        self._names = {"stage": name, "position": f"{name}_position"}
        lock = int(self._of_all_attempts, 16) - (1 << 63)
        await connection.execute("SELECT pg_advisory_lock($1)", lock)
        try:
            yield
        finally:
            if not connection.is_closed():
                await connection.execute("SELECT pg_advisory_unlock($1)", lock)

    async def _found(self) -> TablePosition | None:
        if not await self._exists("position"):
            return None
        return TablePosition(**await self._connection.fetchrow(SELECT_POSITION.format(**self._names)))

    async def _exists(self, name: str) -> bool:
        return bool(await self._connection.fetchval("SELECT to_regclass($1) IS NOT NULL", self._names[name]))

    async def _fits(self, position: TablePosition) -> bool:
        if not await self._exists("stage"):
            return False
        rows = await self._connection.fetchval("SELECT count(*) FROM {stage}".format(**self._names))
        if position.rows != rows:
            return False  # the server itself has crashed
        if not await self._is_unchanged(position.identity, position.after, position.rows):
            return False
        self._stage = await describe_table(self._connection, self._names["stage"])
        self._stage.columns.pop(ORDINAL, None)
        return True

    async def _create(self) -> None:
        connection, names = self._connection, self._names
        async with connection.transaction():
            await connection.execute(DROP_BOTH.format(**names))
            self._stage = await _make_stage(connection, self._transfer, self._table, names["stage"], lasting=True)
            await self._name("stage")
            await self._record(self._position)

    async def _name(self, table: str) -> None:
        """Comments a table with its command, for people who find it."""
        text = f"execution {self._call.execution_id}, command {self._call.command_id}"
        comment = await self._connection.fetchval("SELECT quote_literal($1::text)", text)
        await self._connection.execute(NAME_STAGE.format(name=self._names[table], text=comment))

    async def _record(self, position: TablePosition) -> None:
        """Records a position in the current transaction; creates its table if it is missing."""
        connection, values = self._connection, position.model_dump()
        if not await self._exists("position"):
            await connection.execute(CREATE_POSITION.format(**self._names))
            await self._name("position")
            await connection.execute(FIRST_POSITION.format(**self._names))
        await connection.execute(RECORD_POSITION.format(**self._names), *values.values())

    async def stage(self) -> None:
        """Commits the rows after the position, chunk by chunk."""
        if not self._lasting:
            return
        connection, table, stage, position = self._connection, self._table, self._stage, self._position
        drift = Drift(self._options.on_drift, f"table {table.name}", stage.columns)
        drift.added = {name: kind for name, kind in stage.columns.items() if name not in table.columns}
        copier = self._copier = Copier(connection, stage, drift, self._transfer)
        copier.read = copier.written = position.rows
        copier.columns = dict.fromkeys(position.columns)
        copier.checksum = Checksum.of_text(position.checksum)
        async with connection.transaction():
            await copier.start(after=position.after, resumable=True)
        while await copier.ready():
            async with connection.transaction():
                await connection.execute(ASYNCHRONOUS_COMMIT)
                position.after = await copier.step(staging.COMMIT_SECONDS)
                position.rows, position.columns = copier.written, list(copier.columns)
                position.checksum = str(copier.checksum)
                await self._record(position)

    async def publish(self) -> TransferOutcome:
        """Moves the rows to the table, and records the outcome."""
        connection, table = self._connection, self._table
        async with connection.transaction():
            if self._lasting:
                if self._options.mode is WriteMode.REPLACE:
                    await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
                outcome = await self._copier.move(table)
                await connection.execute("DROP TABLE {stage}".format(**self._names))
            else:
                outcome = await _in_one_transaction(connection, self._transfer)
            await self._record(await self._end(outcome))
        return outcome

    async def discard(self) -> None:
        """Drops both tables when the end of the command is in the log."""
        if self._names:
            with postgres_errors(self._call):
                await self._pool.execute(DROP_BOTH.format(**self._names))
