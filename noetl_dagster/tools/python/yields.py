"""Gathers the values of a playbook's generators into chunks, without holding all of them.

Imports little, so that the subprocess of ``isolation: subprocess`` starts fast.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from noetl_dagster.tools.chunks.gather import Gathered, Gathering
from noetl_dagster.tools.python.code import FAILURES, Program, failure_of
from noetl_dagster.tools.rows.jsonable import is_table, to_jsonable

if TYPE_CHECKING:
    import pyarrow as pa


def chunks_of(
    values: Generator[Any, Any, Any], program: Program, chunk_bytes: int, *, seeks: bool
) -> Generator[Gathered, None, None]:
    """Yields the chunks of a generator, which continues when the next one is requested and is closed in any case.

    Args:
        seeks: each value is a pair of rows and a position.

    Raises:
        CodeFailure: the generator raised, or yielded a value that is no pair or has no JSON form.
    """
    gathering = Gathering(chunk_bytes)
    try:
        with closing(values):
            for value in values:
                yield from gathering.add(*_rows_and_position(value, seeks=seeks))
    except FAILURES as error:
        raise failure_of(error, program) from None
    if (rest := gathering.rest()) is not None:
        yield rest


async def async_chunks_of(
    values: AsyncGenerator[Any, Any], program: Program, chunk_bytes: int, *, seeks: bool
) -> AsyncGenerator[Gathered, None]:
    """Yields the chunks of an async generator, as :func:`chunks_of` does."""
    gathering = Gathering(chunk_bytes)
    try:
        async with aclosing(values):
            async for value in values:
                for chunk in gathering.add(*_rows_and_position(value, seeks=seeks)):
                    yield chunk
    except FAILURES as error:
        raise failure_of(error, program) from None
    if (rest := gathering.rest()) is not None:
        yield rest


def _rows_and_position(value: Any, *, seeks: bool) -> tuple[list[Any] | pa.Table, Any]:
    position = None
    if seeks:
        if not isinstance(value, tuple) or len(value) != 2:
            kind = type(value).__name__
            raise TypeError(
                f"code that asks for 'position' yields pairs, 'yield rows, position'; it gave a {kind}"
            )
        value, position = value[0], to_jsonable(value[1], "position")
    if is_table(value):
        return arrow_table(value), position
    return to_jsonable(value if isinstance(value, list) else [value], "a yielded value"), position


def arrow_table(value: Any) -> pa.Table:
    """Returns a pandas frame or an Arrow table or batch as an Arrow table."""
    import pyarrow as pa

    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    return value if isinstance(value, pa.Table) else pa.Table.from_pandas(value, preserve_index=False)
