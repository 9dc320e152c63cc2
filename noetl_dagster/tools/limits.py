"""Limits that a tool's own fields ask for: ``timeout``, beside the task's ``spec.timeout``, and numbers of rows."""

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


def count_of(call: ToolCall, field: str) -> int | None:
    """A number of rows in a call's config, such as ``chunk_size``; None where there is none, or 0.

    Raises:
        ToolError: it is no whole number, or less than 0.
    """
    given = call.config.get(field)
    if not given:
        return None
    try:
        count = int(given)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ToolError(
            f"{call.task.kind} in step {call.step}: {field} {given!r} is no number of rows; "
            "write a whole number from 1",
            kind="schema",
        )
    return count
