"""The references of results in ``noetl.result_ref``, without their bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from noetl_dagster.errors import ReferenceNotAvailableError, StorageError
from noetl_dagster.result_ref import ROWS_ALONE, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage import queries
from noetl_dagster.storage.codec import dump_json

_PAGE = 500


class RefCatalog:
    """The tables of results. Without a pool, references are passed on but not recorded."""

    def __init__(self, pool: asyncpg.Pool | None) -> None:
        self._pool = pool

    @asynccontextmanager
    async def connection(self, given: Any = None) -> AsyncIterator[Any]:
        """Yields the caller's connection, so that rows join its transaction, or one of the pool."""
        if given is not None:
            yield given
        elif self._pool is None:
            raise StorageError("results are not recorded here: this store has no database; set NOETL_DB_URL")
        else:
            async with self._pool.acquire() as connection:
                yield connection

    async def record(self, refs: Sequence[ResultRef], connection: Any = None) -> None:
        """Writes the rows of references in one statement. Recording twice is harmless."""
        if not refs or (self._pool is None and connection is None):
            return
        columns = [list(column) for column in zip(*map(_row, refs), strict=True)]
        async with self.connection(connection) as open_connection:
            await open_connection.execute(queries.INSERT_REFS, *columns)

    async def by_ref(self, ref: str) -> ResultRef:
        """Returns the reference of a logical name.

        Raises:
            ReferenceNotAvailableError: it is not recorded.
        """
        whole = ref.removesuffix(ROWS_ALONE)
        async with self.connection() as connection:
            row = await connection.fetchrow(queries.FIND_BY_REF, whole)
        found = _found(row, ref)
        return found if whole == ref else found.rows_alone

    async def by_name(self, execution_id: int, step: str, name: str) -> ResultRef:
        """Returns the latest result of this name; raises as :meth:`by_ref`."""
        async with self.connection() as connection:
            row = await connection.fetchrow(queries.FIND_BY_NAME, execution_id, step, name)
        return _found(row, f"result {name!r} of step {step!r} in execution {execution_id}")

    async def stored(
        self, tiers: Sequence[StoreTier], execution_id: int | None, now: datetime
    ) -> AsyncIterator[list[ResultRef]]:
        """Yields pages of references whose bytes should be in these tiers now, of all executions or of one."""
        after = -1
        while True:
            async with self.connection() as connection:
                rows = await connection.fetch(
                    queries.PAGE_OF_STORED, after, execution_id, [tier.value for tier in tiers], now, _PAGE
                )
            if not rows:
                return
            yield [ref_from_row(row) for row in rows]
            after = rows[-1]["ref_id"]

    @asynccontextmanager
    async def locked_expired(self, now: datetime) -> AsyncIterator[tuple[Any, list[ResultRef]]]:
        """Locks up to a page of expired references until the block ends."""
        async with self.connection() as connection, connection.transaction():
            rows = await connection.fetch(queries.LOCK_EXPIRED, now, _PAGE)
            yield connection, [ref_from_row(row) for row in rows]

    async def unrecorded(self, owners: Sequence[tuple[int, int]], *, unknown: bool) -> set[int]:
        """Returns the reference ids of ended executions that have no row.

        Args:
            owners: pairs of execution id and reference id.
            unknown: executions that the log does not contain count as ended.
        """
        executions, ref_ids = zip(*owners, strict=True)
        async with self.connection() as connection:
            rows = await connection.fetch(queries.UNRECORDED, executions, ref_ids, unknown)
        return {row["ref_id"] for row in rows}

    async def forget(self, ref_ids: Sequence[int], connection: Any = None) -> None:
        """Deletes rows; the part lists of manifests are deleted with them."""
        if self._pool is None and connection is None:
            return
        async with self.connection(connection) as open_connection:
            await open_connection.execute(queries.DELETE_REFS, list(ref_ids))

    async def parts(
        self, manifest_id: int, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[ResultRef]:
        """Yields the references in a manifest, in order, a page at a time.

        Args:
            start, stop: half-open range of positions.

        Raises:
            ReferenceNotAvailableError: the row of a part is missing; names its position.
        """
        last = start - 1
        while True:
            limit = _PAGE if stop is None else min(_PAGE, stop - last - 1)
            async with self.connection() as connection:
                rows = await connection.fetch(queries.PAGE_OF_PARTS, manifest_id, last, limit)
            for row in rows:
                if row["ref_id"] is None:
                    raise ReferenceNotAvailableError(
                        f"part {row['part_index']} of manifest {manifest_id} has expired or was deleted "
                        f"(reference {row['part_ref_id']})"
                    )
                yield ref_from_row(row)
            if len(rows) < limit or (stop is not None and rows[-1]["part_index"] >= stop - 1):
                return
            last = rows[-1]["part_index"]


def _found(row: Any, what: str) -> ResultRef:
    if row is None:
        raise ReferenceNotAvailableError(f"{what} is not recorded: expired, deleted, or never stored")
    return ref_from_row(row)


def _row(ref: ResultRef) -> tuple[Any, ...]:
    return (
        ref.ref_id,
        ref.ref,
        ref.execution_id,
        ref.source_step,
        ref.name,
        ref.kind.value,
        ref.scope.value,
        ref.store_tier.value,
        ref.physical_uri,
        ref.content_type,
        ref.compression,
        ref.bytes_size,
        ref.sha256,
        ref.rows,
        ref.preview,
        dump_json(ref.extracted).decode(),
        dump_json(ref.extra).decode(),
        ref.parent_ref_id,
        ref.expires_at,
    )


def ref_from_row(row: Any) -> ResultRef:
    """Returns the reference of a row of ``noetl.result_ref``."""
    fields = {name: row[name] for name in ResultRef.model_fields}
    fields["extracted"] = orjson.loads(fields["extracted"])
    fields["extra"] = orjson.loads(fields["extra"])
    return ResultRef.model_validate(fields)
