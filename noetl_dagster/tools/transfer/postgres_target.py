"""PostgreSQL as a target: in one transaction, or staged in tables that outlive a killed process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import asyncpg

from noetl_dagster.playbook.templates.environment import sql_identifier
from noetl_dagster.tools.sql.connection import open_connection, open_pool, postgres_errors
from noetl_dagster.tools.sql.tables import DELETE_ALL_ROWS, SqlTable, WriteMode, describe_table, listed
from noetl_dagster.tools.transfer.checksum import Checksum
from noetl_dagster.tools.transfer.chunks import (
    Drift,
    StagedTarget,
    Transfer,
    TransferOutcome,
    can_resume,
    digest_of,
)
from noetl_dagster.tools.transfer.copying import ORDINAL, Copier, compare_counts, upsert_keys
from noetl_dagster.tools.transfer.options import Resumable, Verify
from noetl_dagster.tools.transfer.postgres_source import PostgresSource

STAGE = "noetl_transfer_stage"
AUTO_BYTES = 256 << 20  # size from which on a source that can resume is staged
COMMIT_SECONDS = 0.5  # between commits of staged rows with their position, at least
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
    box, source = transfer.box, transfer.source
    with postgres_errors(own):
        # a source that has a connection of the pool must not wait for another one, as others of its kind do
        async with open_connection(own, box, lone=isinstance(source, PostgresSource)) as connection:
            resumes = can_resume(transfer, seeks=source.seeks)
            if resumes and transfer.options.resumable is Resumable.AUTO:
                table = sql_identifier(transfer.target.table)
                resumes = source.bytes >= AUTO_BYTES and await connection.fetchval(MAY_STAGE, table)
            if resumes and box.after is not None:
                target = StagedTable(transfer, connection, await open_pool(own, box))
                box.after(transfer.call, target.discard)
                return await target.run()
            async with connection.transaction():
                return await _in_one_transaction(connection, transfer)


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


class StagedTable(StagedTarget):
    """Stages the rows of a table in its schema.

    Rows are committed chunk by chunk to a table that is named after the command, with the position of the source in a
    second table. One transaction then moves the rows to the target, drops the stage, and records the outcome beside
    the position, for a command whose process is killed just then. All calls of the command's task share these tables:
    ``ended`` is the number of the last call that has published, so that an earlier one does not resume the rows of a
    later one when the command runs again.
    """

    def __init__(self, transfer: Transfer, connection: asyncpg.Connection, pool: asyncpg.Pool) -> None:
        super().__init__(transfer)
        self._connection, self._pool = connection, pool
        call, target = transfer.call, transfer.target
        words = [call.execution_id, call.command_id, call.task.name, call.config.get("source"), target.table]
        self._digest = digest_of([*words, transfer.options.mode, target.key])
        self._names: dict[str, str] = {}
        self._table: SqlTable
        self._stage: SqlTable
        self._found: Any = None
        self._copier: Copier

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[TransferOutcome | None]:
        """Finds or creates the staging.

        Waits until no other process transfers for the same command: one that is assumed dead may still run.
        """
        connection, number = self._connection, self._call.number
        self._table = await describe_table(connection, self._transfer.target.table)
        schema = await connection.fetchval(SCHEMA_OF, self._table.name)
        name = f"{schema}.{PREFIX}{self._digest}"
        self._names = {"stage": name, "position": f"{name}_position"}
        lock = int(self._digest, 16) - (1 << 63)
        await connection.execute("SELECT pg_advisory_lock($1)", lock)
        try:
            position = await self._position()
            if position is not None and position["outcome"] and number <= position["ended"]:
                yield TransferOutcome(**position["outcome"])
                return
            if position is not None and await self._fits(position):
                self._found = position
                self._stage = await describe_table(connection, name)
                self._stage.columns.pop(ORDINAL, None)
            else:
                async with connection.transaction():
                    await self._create(position)
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
        if not await self._exists("stage"):
            return False
        rows = await self._connection.fetchval("SELECT count(*) FROM {stage}".format(**self._names))
        if position["rows"] != rows:
            return False  # the server itself has crashed
        return await self._is_unchanged(position["identity"], position["after"], position["rows"])

    async def _create(self, before: Any) -> None:
        """Creates an empty staging, which keeps the outcome of an earlier call of the command."""
        connection, call = self._connection, self._call
        await connection.execute(DROP_BOTH.format(**self._names))
        self._stage = await _make_stage(connection, self._transfer, self._table, self._names["stage"], lasting=True)
        await connection.execute(CREATE_POSITION.format(**self._names))
        comment = await connection.fetchval(
            "SELECT quote_literal($1::text)", f"execution {call.execution_id}, command {call.command_id}"
        )
        await connection.execute(NAME_STAGE.format(name=self._names["stage"], text=comment))
        ended, outcome = (0, None) if before is None else (before["ended"], before["outcome"])
        first = FIRST_POSITION.format(**self._names)
        await connection.execute(first, self._source.identity, ended, outcome)

    async def stage(self) -> None:
        """Commits the rows after the position, chunk by chunk."""
        connection, table, stage, found = self._connection, self._table, self._stage, self._found
        drift = Drift(self._options.on_drift, f"table {table.name}", stage.columns)
        drift.added = {name: kind for name, kind in stage.columns.items() if name not in table.columns}
        copier = self._copier = Copier(connection, stage, drift, self._transfer)
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
            if self._options.mode is WriteMode.REPLACE:
                await connection.execute(DELETE_ALL_ROWS.format(table=table.name))
            outcome = await self._copier.move(table)
            outcome.resumed = self._resumed
            await connection.execute("DROP TABLE {stage}".format(**self._names))
            await connection.execute(RECORD_OUTCOME.format(**self._names), self._call.number, asdict(outcome))
        return outcome

    async def discard(self) -> None:
        """Drops both tables when the end of the command is in the log."""
        if self._names:
            with postgres_errors(self._call):
                await self._pool.execute(DROP_BOTH.format(**self._names))
