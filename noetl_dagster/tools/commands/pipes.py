"""Dagster Pipes: jobs outside of this process that report to the Dagster run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import JobMessages, Toolbox, ToolCall


@asynccontextmanager
async def pipes_variables(
    call: ToolCall, box: Toolbox, default: JobMessages
) -> AsyncIterator[Mapping[str, str]]:
    """Yields the variables by which a job reports to its run, while it runs.

    There are none without ``pipes``, without Dagster, and in workers.

    Args:
        default: the channel of ``pipes: true``.

    Raises:
        ToolError: ``pipes`` names no channel.
    """
    asked = call.config.get("pipes")
    if not asked:
        yield {}
        return
    try:
        way = default if asked is True else JobMessages(str(asked))
    except ValueError:
        raise ToolError(
            f"{call.task.kind} in step {call.step}: pipes is true, {' or '.join(JobMessages)}, not {asked!r}",
            kind="schema",
        ) from None
    if box.pipes is None:
        yield {}
        return
    async with box.pipes(call, way) as variables:
        yield variables
