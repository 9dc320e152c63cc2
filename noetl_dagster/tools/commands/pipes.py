"""Jobs that are started outside of this process and tell the Dagster run what they do, by Dagster Pipes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import JobMessages, Toolbox, ToolCall


@asynccontextmanager
async def pipes_variables(
    call: ToolCall, box: Toolbox, default: JobMessages
) -> AsyncIterator[Mapping[str, str]]:
    """The variables by which a job finds the run that hears it, while it runs.

    None where ``pipes`` is not asked for, and where nobody would hear it: without Dagster, and in workers.

    Args:
        default: what ``pipes: true`` means.

    Raises:
        ToolError: ``pipes`` is no way that messages may go.
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
