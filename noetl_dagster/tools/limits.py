"""Time limits that a tool's own ``timeout`` field asks for, beside the task's ``spec.timeout``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolCall


@asynccontextmanager
async def time_limit(call: ToolCall) -> AsyncIterator[None]:
    """Cancels the block after ``timeout`` seconds of the call's config; no limit when there is none.

    Raises:
        ToolError: of kind ``timeout``, retryable; of kind ``schema`` when ``timeout`` is no number.
    """
    seconds = seconds_of(call)
    if seconds is None:
        yield
        return
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise ToolError(
            f"{call.task.kind} in step {call.step} took longer than its timeout of {seconds:g} s",
            kind="timeout",
            retryable=True,
        ) from None


def seconds_of(call: ToolCall) -> float | None:
    """The ``timeout`` of a call's config.

    Raises:
        ToolError: it is no number.
    """
    given = call.config.get("timeout")
    try:
        return None if given is None else float(given)
    except (TypeError, ValueError):
        raise ToolError(
            f"{call.task.kind} in step {call.step}: timeout {given!r} is no number of seconds",
            kind="schema",
        ) from None
