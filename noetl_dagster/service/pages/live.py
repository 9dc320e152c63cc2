"""Live pages: a browser asks every second for what is new, with the place in the log up to which it shows an execution.

People who watch the same execution share what an API process reads once a second, however many they are. The place is
one in the order of commits, so no event is missing or repeated, whichever process answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import asyncpg
import orjson
from starlette.responses import Response

from noetl_dagster.engine.executions.watching import ShownEvent, WatchedExecution, changes_between
from noetl_dagster.events.commit_order import Position, has_ended
from noetl_dagster.service.pages.access import secure_headers

INTERVAL = 1.0
"""Seconds for which an execution is not read again."""

READING_SHARE = 10
"""Reading takes long while the projection is behind: the pause after it is at least this many times as long."""

LINGER_SECONDS = 5.0
"""Time after which the state of an execution that nobody watches is forgotten."""

MOST_ANSWERS = 5
"""Places for which answers are kept: browsers show an execution up to few different ones."""

Parts = dict[str, str]
RenderParts = Callable[[WatchedExecution], Parts]
RenderRows = Callable[[Sequence[ShownEvent]], str]


class LiveExecution:
    """What the people who watch an execution share."""

    def __init__(self, execution_id: int, parts: RenderParts, rows: RenderRows) -> None:
        self._id = execution_id
        self._render_parts, self._render_rows = parts, rows
        self._parts: dict[str, tuple[int, str]] = {}  # with the first position of browsers that surely show it
        self._position = -1
        self._ended = False
        self._answers: dict[int, bytes] = {}
        self._due = float("-inf")
        self._asked_at = time.monotonic()
        self._reading = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """True if nobody has asked for a while."""
        return time.monotonic() - self._asked_at > LINGER_SECONDS

    async def since(self, pool: asyncpg.Pool, position: int) -> bytes:
        """Returns an answer for a browser that shows the execution up to a position.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        self._asked_at = time.monotonic()
        async with self._reading:
            if time.monotonic() >= self._due:
                await self._read(pool)
            if position not in self._answers:
                if len(self._answers) == MOST_ANSWERS:
                    self._answers.clear()
                self._answers[position] = await self._answer(pool, position)
            return self._answers[position]

    async def _read(self, pool: asyncpg.Pool) -> None:
        began = time.monotonic()
        watched = await WatchedExecution.read(pool, self._id)
        self._position = watched.position
        self._ended = not watched.is_running and await has_ended(pool, self._id, Position(watched.position, 0))
        self._answers.clear()
        for name, text in self._render_parts(watched).items():
            if name not in self._parts or self._parts[name][1] != text:
                # while an older transaction runs, the position stays and the state changes
                self._parts[name] = (watched.position + 1, text)
        now = time.monotonic()
        self._due = now + max(INTERVAL, READING_SHARE * (now - began))

    async def _answer(self, pool: asyncpg.Pool, position: int) -> bytes:
        now = self._position
        if position > now:  # another process of the API has read more
            return answer(str(position), {}, "", ended=False)
        events = await changes_between(pool, self._id, position, now) if position < now else []
        parts = {name: text for name, (shown_from, text) in self._parts.items() if position < shown_from}
        return answer(str(now), parts, self._render_rows(events), ended=self._ended)


class LiveExecutions:
    """The executions that people watch."""

    def __init__(self) -> None:
        self._executions: dict[int, asyncio.Task[LiveExecution]] = {}

    async def open(self, execution_id: int, read: Callable[[], Coroutine[Any, Any, LiveExecution]]) -> LiveExecution:
        """Returns an execution, whose playbook the first of several requests reads."""
        task = self._executions.get(execution_id)
        if task is None or _is_over(task):
            self._executions = {id_: one for id_, one in self._executions.items() if not _is_over(one)}
            task = self._executions[execution_id] = asyncio.create_task(read())
        return await asyncio.shield(task)


def _is_over(task: asyncio.Task[LiveExecution]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().is_idle)


def answer(position: str, parts: Parts, rows: str, *, ended: bool) -> bytes:
    """Returns what a live page gets.

    Args:
        position: up to which it shows the execution then.
        parts: of the page that may have changed, as markup by id.
        rows: of the table of events, to be added.
        ended: the execution has ended, and the page need not ask again.
    """
    return orjson.dumps({"position": position, "parts": parts, "rows": rows, "ended": ended})


def response(content: bytes) -> Response:
    """Returns an answer as a response."""
    return Response(content, media_type="application/json", headers=secure_headers())
