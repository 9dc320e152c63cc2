"""The references of results in ``noetl.result_ref``, without their bytes.

JSON travels as text, for any codecs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.events.connection import PATIENCE
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.result_ref import ROWS_ALONE, ResultRef
from noetl_dagster.values import encode_json

_PAGE = 500

_COLUMNS = tuple(ResultRef.model_fields)
_JSON = ("extracted", "extra")
_TYPES = {
    "execution_id": "bigint", "ref_id": "bigint", "parent_ref_id": "bigint", "bytes_size": "bigint", "rows": "bigint",
    "expires_at": "timestamptz",
}  # fmt: skip
"""Types of the parameters that are not text."""

_LIST = ", ".join(_COLUMNS)
_ARRAYS = ", ".join(f"${place}::{_TYPES.get(name, 'text')}[]" for place, name in enumerate(_COLUMNS, start=1))
_SELECTED = ", ".join(f"{name}::text AS {name}" if name in _JSON else name for name in _COLUMNS)

# one statement for one reference or for thousands
_INSERT = f"""
    INSERT INTO noetl.result_ref ({_LIST})
    SELECT {", ".join(f"{name}::jsonb" if name in _JSON else name for name in _COLUMNS)}
    FROM unnest({_ARRAYS}) AS given ({_LIST})
    ON CONFLICT (ref_id) DO NOTHING
"""

_BY_REF = f"SELECT {_SELECTED} FROM noetl.result_ref WHERE ref = $1"

# the latest result of this name
_BY_NAME = f"""
    SELECT {_SELECTED} FROM noetl.result_ref
    WHERE execution_id = $1 AND source_step = $2 AND name = $3
    ORDER BY ref_id DESC LIMIT 1
"""

# the oldest expired references, without rows that another process has locked
_LOCK_EXPIRED = f"""
    SELECT {_SELECTED} FROM noetl.result_ref
    WHERE expires_at <= $1
    ORDER BY expires_at LIMIT $2
    FOR UPDATE SKIP LOCKED
"""

# objects of a store without a reference here: of ended executions, and with $3 also of unknown ones. A put whose answer
# was lost has left an object, although its reference names one of the fallbacks $4. Results that the log names stay:
# somebody has lost their rows, and a resumption still reads them.
_UNRECORDED = """
    WITH stored AS MATERIALIZED (
        SELECT DISTINCT stored.execution_id, stored.ref_id
        FROM unnest($1::bigint[], $2::bigint[]) AS stored (execution_id, ref_id)
        LEFT JOIN noetl.execution ON execution.execution_id = stored.execution_id
        WHERE NOT EXISTS (
            SELECT FROM noetl.result_ref WHERE result_ref.ref_id = stored.ref_id AND store_tier <> ALL($4))
          AND CASE WHEN execution.execution_id IS NOT NULL THEN execution.status <> 'RUNNING'
              ELSE $3 AND NOT EXISTS (SELECT FROM noetl.event WHERE event.execution_id = stored.execution_id) END
    ), named AS MATERIALIZED (
        SELECT one ->> 'ref_id' AS ref_id
        FROM (SELECT DISTINCT execution_id FROM stored) ended
        CROSS JOIN LATERAL (
            SELECT unnest(ARRAY[result -> 'reference', context -> 'collection_reference']) AS one FROM noetl.event
            WHERE event.execution_id = ended.execution_id AND (result ? 'reference' OR context ? 'collection_reference')
            OFFSET 0) names
        WHERE one ->> 'store_tier' <> ALL($4) AND COALESCE((one ->> 'expires_at')::timestamptz > now(), true)
    )
    SELECT ref_id FROM stored WHERE ref_id::text NOT IN (SELECT ref_id FROM named WHERE ref_id IS NOT NULL)
"""

# what should be in stores now, of one execution or of all, page by page
_PAGE_OF_STORED = f"""
    SELECT {_SELECTED} FROM noetl.result_ref
    WHERE ref_id > $1 AND ($2::bigint IS NULL OR execution_id = $2)
      AND kind <> 'manifest' AND (expires_at IS NULL OR expires_at > $3)
    ORDER BY ref_id LIMIT $4
"""
_IS_RECORDED = """
    SELECT EXISTS (SELECT FROM noetl.result_ref WHERE ref_id = $1 AND (expires_at IS NULL OR expires_at > now()))
"""

# one page of parts in order; a part without a row has a null ref_id
_PAGE_OF_PARTS = f"""
    SELECT part_index, part_ref_id, part.*
    FROM noetl.manifest_part
    LEFT JOIN LATERAL (SELECT {_SELECTED} FROM noetl.result_ref WHERE ref_id = part_ref_id) AS part ON true
    WHERE manifest_id = $1 AND part_index > $2
    ORDER BY part_index LIMIT $3
"""

_DELETE = "DELETE FROM noetl.result_ref WHERE ref_id = ANY($1::bigint[])"


class RefCatalog:
    """The tables of results. Without a pool, references are passed on but not recorded."""

    def __init__(self, pool: asyncpg.Pool | None) -> None:
        self._pool = pool

    @asynccontextmanager
    async def connection(self, own: Any = None) -> AsyncIterator[Any]:
        """Yields the caller's connection, so that rows join its transaction, or one of the pool."""
        if own is not None:
            yield own
        elif self._pool is None:
            raise StorageError("results are not recorded here: this store has no database; set NOETL_DB_URL")
        else:
            async with self._pool.acquire() as connection:
                yield connection

    async def record(self, refs: Sequence[ResultRef], connection: Any = None) -> None:
        """Writes the rows of references in one statement. Recording twice is harmless.

        Without a connection of the caller, it waits for a database that is away, as the event log does.
        """
        if not refs or (self._pool is None and connection is None):
            return
        columns = [[_value(ref, name) for ref in refs] for name in _COLUMNS]

        async def write() -> None:
            async with self.connection(connection) as open_connection:
                await open_connection.execute(_INSERT, *columns)

        await (write() if connection is not None else with_retries(write, PATIENCE))

    async def by_ref(self, ref: str) -> ResultRef:
        """Returns the reference of a logical name; raises ``ReferenceNotAvailableError`` if it is not recorded."""
        whole = ref.removesuffix(ROWS_ALONE)
        async with self.connection() as connection:
            ref_row = _found(await connection.fetchrow(_BY_REF, whole), ref)
        return ref_row if whole == ref else ref_row.rows_alone

    async def by_name(self, execution_id: int, step: str, name: str) -> ResultRef:
        """Returns the latest result of this name; raises as :meth:`by_ref`."""
        async with self.connection() as connection:
            row = await connection.fetchrow(_BY_NAME, execution_id, step, name)
        return _found(row, f"result {name!r} of step {step!r} in execution {execution_id}")

    async def is_recorded(self, ref: ResultRef) -> bool:
        """Reports whether a reference has a row and has not expired."""
        async with self.connection() as connection:
            return bool(await connection.fetchval(_IS_RECORDED, ref.ref_id))

    async def stored(self, execution_id: int | None, now: datetime) -> AsyncIterator[list[ResultRef]]:
        """Yields pages of references whose bytes should be in a store now, of all executions or of one."""
        after = -1
        while True:
            async with self.connection() as connection:
                rows = await connection.fetch(_PAGE_OF_STORED, after, execution_id, now, _PAGE)
            if not rows:
                return
            yield [_ref_from(row) for row in rows]
            after = rows[-1]["ref_id"]

    @asynccontextmanager
    async def locked_expired(self, now: datetime) -> AsyncIterator[tuple[Any, list[ResultRef]]]:
        """Locks up to a page of expired references until the block ends."""
        async with self.connection() as connection, connection.transaction():
            yield connection, [_ref_from(row) for row in await connection.fetch(_LOCK_EXPIRED, now, _PAGE)]

    async def unrecorded(
        self, owners: Sequence[tuple[int, int]], *, unknown: bool, elsewhere: Sequence[str]
    ) -> set[int]:
        """Returns the reference ids of ended executions that neither a row nor an event names.

        Args:
            owners: pairs of an execution and a reference id.
            unknown: executions that the log does not contain count as ended.
            elsewhere: a row with one of these tiers does not count.
        """
        executions, ref_ids = zip(*owners, strict=True)
        async with self.connection() as connection:
            rows = await connection.fetch(_UNRECORDED, executions, ref_ids, unknown, elsewhere)
        return {row["ref_id"] for row in rows}

    async def forget(self, ref_ids: Sequence[int], connection: Any = None) -> None:
        """Deletes rows; the part lists of manifests are deleted with them."""
        if self._pool is None and connection is None:
            return
        async with self.connection(connection) as open_connection:
            await open_connection.execute(_DELETE, ref_ids)

    async def parts(self, manifest_id: int, start: int = 0, stop: int | None = None) -> AsyncIterator[ResultRef]:
        """Yields the references in a half-open range of a manifest, in order, reading a page at a time.

        Raises:
            ReferenceNotAvailableError: the row of a part is missing; names its position.
        """
        last = start - 1
        while True:
            limit = _PAGE if stop is None else min(_PAGE, stop - last - 1)
            async with self.connection() as connection:
                rows = await connection.fetch(_PAGE_OF_PARTS, manifest_id, last, limit)
            for row in rows:
                if row["ref_id"] is None:
                    raise ReferenceNotAvailableError(
                        f"part {row['part_index']} of manifest {manifest_id} has expired or was deleted "
                        f"(reference {row['part_ref_id']})"
                    )
                yield _ref_from(row)
            if len(rows) < limit or (stop is not None and rows[-1]["part_index"] >= stop - 1):
                return
            last = rows[-1]["part_index"]


def _found(row: Any, what: str) -> ResultRef:
    if row is None:
        raise ReferenceNotAvailableError(f"{what} is not recorded: expired, deleted, or never stored")
    return _ref_from(row)


def _value(ref: ResultRef, name: str) -> Any:
    value = getattr(ref, name)
    return encode_json(value).decode() if isinstance(value, dict) else value


def _ref_from(row: Any) -> ResultRef:
    fields = {name: orjson.loads(row[name]) if name in _JSON else row[name] for name in _COLUMNS}
    return ResultRef.model_validate(fields)
