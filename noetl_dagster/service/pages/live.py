"""Live updates of an execution's page, as server-sent events.

People who watch the same execution share a feed: it reads the log once a second with one statement, and renders what
changed once. Each message has the position in the log up to which its receiver knows the execution. A browser that
connects again sends the position of its last message, and receives what follows: nothing is missing or repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import orjson

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.watching import ShownEvent, WatchedExecution, changes_between
from noetl_dagster.events.connection import DATABASE_ERRORS
from noetl_dagster.process.event_loop import cancel_and_wait

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two reads of the log."""

LINGER_SECONDS = 5.0
"""Time after which a feed that nobody watches ends."""

MOST_KEPT = 120
"""Messages that a feed keeps for browsers that connect again; others read what they missed from the log."""

MOST_QUEUED = 30
"""Messages that wait for a slow browser; beyond, it is disconnected, and connects again."""

Parts = dict[str, str]
RenderParts = Callable[[WatchedExecution], Parts]
RenderRows = Callable[[Sequence[ShownEvent]], str]


class _Message(NamedTuple):
    position: int
    events: list[ShownEvent]
    content: bytes


class Feed:
    """The live updates of one execution."""

    def __init__(self, engine: Engine, watched: WatchedExecution, parts: RenderParts, rows: RenderRows) -> None:
        self.watched = watched
        self._engine = engine
        self._render_parts, self._render_rows = parts, rows
        self._kept: deque[_Message] = deque(maxlen=MOST_KEPT)
        self._first = watched.position
        self._sent: Parts = {}
        self._queues: set[asyncio.Queue[_Message | None]] = set()

    @property
    def viewers(self) -> int:
        """The number of people who watch."""
        return len(self._queues)

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields messages for a browser that knows the execution up to a position; ends with the execution."""
        queue: asyncio.Queue[_Message | None] = asyncio.Queue(MOST_QUEUED)
        self._queues.add(queue)
        now = self.watched.position
        try:
            if after < now:
                if after >= self._first:
                    missed = [event for one in self._kept if one.position > after for event in one.events]
                else:
                    missed = await changes_between(self._engine.runtime.pool, self.watched.id, after, now)
                yield self._message(now, missed, self._render_parts(self.watched)).content
            while (message := await queue.get()) is not None:
                if message.position > now:
                    now = message.position
                    yield message.content
            if not self.watched.is_running:
                yield b"event: end\ndata: {}\n\n"  # otherwise the browser connects again
        finally:
            self._queues.discard(queue)

    async def tick(self) -> None:
        """Reads what was committed since the last time, and sends it."""
        before = self.watched.position
        events = await self.watched.advance(self._engine.runtime.pool)
        if self.watched.position > before and (events or self.watched.is_running):
            parts = self._render_parts(self.watched)
            changed = {name: text for name, text in parts.items() if self._sent.get(name) != text}
            self._sent = parts
            message = self._message(self.watched.position, events, changed)
            if len(self._kept) == MOST_KEPT:
                self._first = self._kept[0].position
            self._kept.append(message)
            self._send(message)
        if not self.watched.is_running:
            self.end()

    def end(self) -> None:
        """Ends the streams of all people who watch."""
        self._send(None)

    def _message(self, position: int, events: list[ShownEvent], parts: Parts) -> _Message:
        data = orjson.dumps({"parts": parts, "rows": self._render_rows(events)})
        return _Message(position, events, b"id: %d\nevent: update\ndata: %s\n\n" % (position, data))

    def _send(self, message: _Message | None) -> None:
        for queue in self._queues:
            if queue.full():  # the browser connects again after its last message
                while not queue.empty():
                    queue.get_nowait()
                message = None
            queue.put_nowait(message)


class Feeds:
    """The feeds of a process, by execution."""

    def __init__(self, engine: Callable[[], Engine], stopping: Callable[[], bool]) -> None:
        self._engine = engine
        self._stopping = stopping
        self._feeds: dict[int, Feed] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, execution_id: int) -> Feed | None:
        """Returns the feed of an execution that somebody watches."""
        return self._feeds.get(execution_id)

    async def open(self, execution_id: int, parts: Callable[[WatchedExecution], Any], rows: RenderRows) -> Feed:
        """Returns the feed of an execution; ``parts`` returns an awaitable of the function that renders its parts.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        async with self._opening.setdefault(execution_id, asyncio.Lock()):
            feed = self._feeds.get(execution_id)
            if feed is None:
                engine = self._engine()
                watched = await WatchedExecution.read(engine.runtime.pool, execution_id)
                feed = self._feeds[execution_id] = Feed(engine, watched, await parts(watched), rows)
                task = asyncio.create_task(self._run(execution_id, feed), name=f"feed {execution_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return feed

    async def close(self) -> None:
        """Ends all feeds."""
        await cancel_and_wait(*self._tasks)

    async def _run(self, execution_id: int, feed: Feed) -> None:
        idle = 0.0
        try:
            with self._engine().projecting.running():  # the next page has less to read
                while idle < LINGER_SECONDS and not self._stopping():
                    await asyncio.sleep(INTERVAL)
                    idle = 0.0 if feed.viewers else idle + INTERVAL
                    await self._tick(feed)
        except Exception:
            logger.exception("the live page of execution %d ends", execution_id)
        finally:
            del self._feeds[execution_id]
            self._opening.pop(execution_id, None)
            feed.end()

    async def _tick(self, feed: Feed) -> None:
        try:
            await feed.tick()
        except DATABASE_ERRORS as error:
            logger.warning("the live page of execution %d waits for the log: %s", feed.watched.id, error)
