"""Live updates of pages, as server-sent events.

People who watch the same execution share a feed, which reads the log once a second with one statement. Each message
has the position in the log up to which its receiver knows the execution. A browser that connects again sends the
position of its last message, and receives what follows: nothing is missing or repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import orjson

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.watching import ShownEvent, WatchedExecution, changes_between
from noetl_dagster.events.commit_order import Committed, Position, events_in_commit_order, has_ended
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

MOST_MISSED = 5
"""Answers to the question of what browsers missed that a feed keeps."""

END = b"event: end\ndata: {}\n\n"
"""The last message: the execution has ended, and the browser need not connect again."""

Parts = dict[str, str]
RenderParts = Callable[[WatchedExecution], Parts]
RenderRows = Callable[[Sequence[ShownEvent]], str]
RenderTrail = Callable[[Sequence[Committed]], str]
Item = TypeVar("Item")


class Queues(Generic[Item]):
    """The people who watch, each with the messages that were not sent yet. None ends a stream."""

    def __init__(self) -> None:
        self._all: set[asyncio.Queue[Item | None]] = set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._all)

    def send(self, item: Item | None) -> None:
        """Sends a message to all; disconnects those that are too slow."""
        self._ended = item is None
        for queue in self._all:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(item)

    def open(self) -> asyncio.Queue[Item | None]:
        """Adds a person; one who comes when the streams have just ended gets the end."""
        queue: asyncio.Queue[Item | None] = asyncio.Queue(MOST_QUEUED)
        if self._ended:
            queue.put_nowait(None)
        self._all.add(queue)
        return queue

    def close(self, queue: asyncio.Queue[Item | None]) -> None:
        """Removes a person."""
        self._all.discard(queue)


class Watchable(Protocol):
    """What :class:`Feeds` keeps going while somebody watches."""

    @property
    def viewers(self) -> int:
        """The number of people who watch."""

    async def tick(self) -> None:
        """Reads what was committed since the last time, and sends it."""

    def end(self) -> None:
        """Ends the streams of all people who watch."""


class _Update(NamedTuple):
    position: int
    events: list[ShownEvent]
    content: bytes


class Feed:
    """The live updates of one execution's page."""

    def __init__(self, engine: Engine, watched: WatchedExecution, parts: RenderParts, rows: RenderRows) -> None:
        self.watched = watched
        self._pool = engine.runtime.pool
        self._render_parts, self._render_rows = parts, rows
        self._kept: deque[_Update] = deque(maxlen=MOST_KEPT)
        self._first = watched.position
        self._sent: Parts = {}
        self._queues: Queues[_Update] = Queues()
        self._missed: dict[tuple[int, int], list[ShownEvent]] = {}
        self._reading = asyncio.Lock()

    @property
    def viewers(self) -> int:
        """The number of people who watch."""
        return len(self._queues)

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields messages for a browser that knows the execution up to a position; ends with the execution."""
        queue = self._queues.open()
        now = self.watched.position
        try:
            if after < now:
                missed = await self._between(after, now)
                yield self._update(now, missed, self._render_parts(self.watched)).content
            while (message := await queue.get()) is not None:
                if message.position > now:
                    now = message.position
                    yield message.content
            if not self.watched.is_running:
                yield END  # otherwise the browser connects again
        finally:
            self._queues.close(queue)

    async def tick(self) -> None:
        """Reads what was committed since the last time, and sends it."""
        before = self.watched.position
        events = await self.watched.advance(self._pool)
        if self.watched.position > before and (events or self.watched.is_running):
            parts = self._render_parts(self.watched)
            changed = {name: text for name, text in parts.items() if self._sent.get(name) != text}
            self._sent = parts
            update = self._update(self.watched.position, events, changed)
            if len(self._kept) == MOST_KEPT:
                self._first = self._kept[0].position
            self._kept.append(update)
            self._queues.send(update)
        if not self.watched.is_running:
            self.end()

    def end(self) -> None:
        """Ends the streams of all people who watch."""
        self._queues.send(None)

    async def _between(self, after: int, now: int) -> list[ShownEvent]:
        """Returns the events that a browser missed; of many that connect again at once, one reads the log."""
        if after >= self._first:
            return [event for one in self._kept if after < one.position <= now for event in one.events]
        async with self._reading:
            if (after, now) not in self._missed:
                if len(self._missed) == MOST_MISSED:
                    self._missed.clear()
                self._missed[after, now] = await changes_between(self._pool, self.watched.id, after, now)
            return self._missed[after, now]

    def _update(self, position: int, events: list[ShownEvent], parts: Parts) -> _Update:
        data = orjson.dumps({"parts": parts, "rows": self._render_rows(events)})
        return _Update(position, events, b"id: %d\nevent: update\ndata: %s\n\n" % (position, data))


class _Arrived(NamedTuple):
    events: list[Committed]
    position: Position


class Trail:
    """Every event of an execution, in the order of commits."""

    def __init__(self, engine: Engine, execution_id: int, position: Position) -> None:
        self._pool = engine.runtime.pool
        self._id = execution_id
        self._position = position
        self._over = False
        self._queues: Queues[_Arrived] = Queues()

    @property
    def viewers(self) -> int:
        """The number of people who watch."""
        return len(self._queues)

    async def follow(self, after: Position, rows: RenderTrail) -> AsyncIterator[bytes]:
        """Yields the events after a position as rows of a table; ends with the execution."""
        queue = self._queues.open()
        try:
            while after < self._position:  # what the trail read before this browser came
                page = await events_in_commit_order(self._pool, self._id, after)
                yield self._message(page.events, page.position, rows)
                after = page.position
                if page.is_last:
                    break
            while (arrived := await queue.get()) is not None:
                events = [one for one in arrived.events if one.position > after]
                if arrived.position > after:
                    after = arrived.position
                    yield self._message(events, after, rows)
            if self._over:
                yield END
        finally:
            self._queues.close(queue)

    async def tick(self) -> None:
        """Reads what was committed since the last time, and sends it."""
        while True:
            page = await events_in_commit_order(self._pool, self._id, self._position)
            self._position = page.position
            if page.events:
                self._queues.send(_Arrived(page.events, page.position))
            if page.is_last:
                break
        self._over = await has_ended(self._pool, self._id, self._position)
        if self._over:
            self.end()

    def end(self) -> None:
        """Ends the streams of all people who watch."""
        self._queues.send(None)

    def _message(self, events: list[Committed], position: Position, rows: RenderTrail) -> bytes:
        data = orjson.dumps({"parts": {}, "rows": rows(events)})
        return b"id: %s\nevent: update\ndata: %s\n\n" % (str(position).encode(), data)


Found = TypeVar("Found", bound=Watchable)


class Feeds:
    """The feeds of a process, by execution and kind."""

    def __init__(self, engine: Callable[[], Engine], stopping: Callable[[], bool]) -> None:
        self._engine = engine
        self._stopping = stopping
        self._feeds: dict[tuple[int, type], Watchable] = {}
        self._opening: dict[tuple[int, type], asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, execution_id: int, kind: type[Found]) -> Found | None:
        """Returns the feed of an execution that somebody watches."""
        feed = self._feeds.get((execution_id, kind))
        return feed if isinstance(feed, kind) else None

    async def open(self, execution_id: int, kind: type[Found], make: Callable[[Engine], Awaitable[Found]]) -> Found:
        """Returns the feed of an execution; ``make`` makes it if nobody watches.

        Raises:
            ExecutionNotFoundError: the log has no such execution.
        """
        key = execution_id, kind
        async with self._opening.setdefault(key, asyncio.Lock()):
            feed = self.find(execution_id, kind)
            if feed is not None:
                return feed
            try:
                made = await make(self._engine())
            except BaseException:
                self._opening.pop(key, None)  # locks of executions that do not exist would pile up
                raise
            feed = self.find(execution_id, kind)  # after a failure, two may have made one
            if feed is None:
                feed = self._feeds[key] = made
                task = asyncio.create_task(self._run(key, feed), name=f"{kind.__name__} of {execution_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return feed

    async def close(self) -> None:
        """Ends all feeds."""
        await cancel_and_wait(*self._tasks)

    async def _run(self, key: tuple[int, type], feed: Watchable) -> None:
        idle = 0.0
        try:
            with self._engine().projecting.running():  # the next page has less to read
                while idle < LINGER_SECONDS and not self._stopping():
                    await asyncio.sleep(INTERVAL)
                    idle = 0.0 if feed.viewers else idle + INTERVAL
                    await self._tick(key, feed)
        except Exception:
            logger.exception("the live page of execution %d ends", key[0])
        finally:
            del self._feeds[key]
            self._opening.pop(key, None)
            feed.end()

    async def _tick(self, key: tuple[int, type], feed: Watchable) -> None:
        try:
            await feed.tick()
        except DATABASE_ERRORS as error:
            logger.warning("the live page of execution %d waits for the log: %s", key[0], error)
