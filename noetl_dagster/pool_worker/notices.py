"""Notices of commands over NATS: a worker's own first, then those for anybody, never more than it has room for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noetl_dagster.events.transport.nats.names import Names
from noetl_dagster.events.transport.nats.pull import ConsumerGoneError, Pull
from noetl_dagster.events.transport.nats.streams import (
    ensure_broadcast_consumer,
    ensure_streams,
    ensure_targeted_consumer,
)
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import DEFAULT_POOL, Settings

logger = logging.getLogger(__name__)

TARGETED, BROADCAST = 0, 1
TAKE_SECONDS = 1.0
REFUSED_SECONDS = 0.1
"""A notice that this worker has no room for is offered again after so long."""


class Notice(BaseModel):
    """A command that waits in the queue. It carries no work: whoever claims the command gets its context."""

    model_config = ConfigDict(frozen=True)

    execution_id: Annotated[int, Field(ge=0, lt=2**63)]
    command_id: Annotated[str, Field(min_length=1, max_length=2_000)]
    event_id: int = 0
    tool_kind: str = ""
    server_url: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A notice with its message, which is acknowledged when the command is claimed or gone."""

    notice: Notice
    message: Msg


class Notices:
    """Takes notices while there is room.

    Args:
        room: places that are free for commands of a tool kind now.
    """

    def __init__(
        self, client: NatsClient, settings: Settings, worker_id: str, room: Callable[[str], int]
    ) -> None:
        self._client = client
        self._settings = settings
        self._worker_id = worker_id
        self._room = room
        self._names = Names.of(settings)
        self._queue: asyncio.PriorityQueue[tuple[int, int, Offer]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._pulls: list[tuple[int, Pull]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._consumer = ""
        self.freed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Notices that were taken and are not dealt with yet."""
        return self._queue.qsize()

    async def open(self) -> None:
        if self._settings.worker_pool != DEFAULT_POOL:
            return  # only control planes that know one pool send notices
        await self._furnish()
        for priority, consumer in ((TARGETED, self._consumer), (BROADCAST, self._names.broadcast_consumer)):
            pull = Pull(self._client, self._names.command_stream, consumer)
            await pull.open()
            self._pulls.append((priority, pull))
            self._tasks.append(asyncio.create_task(self._take(pull, priority)))

    async def next(self) -> Offer:
        """The next notice: targeted ones first."""
        return (await self._queue.get())[2]

    async def close(self) -> None:
        """Stops taking notices and gives back those that nobody has dealt with."""
        if not self._pulls:
            return
        await cancel_and_wait(*self._tasks)
        with contextlib.suppress(nats.errors.Error, OSError):
            for _, pull in self._pulls:
                for message in await pull.close():
                    await message.nak()
            while not self._queue.empty():
                await self._queue.get_nowait()[2].message.nak()
            await self._client.flush(timeout=2)
            # its own notices go to others as soon as it reports that it stops
            await self._client.jetstream()._jsm.delete_consumer(self._names.command_stream, self._consumer)

    async def _furnish(self) -> None:
        """Makes the stream and both consumers where they are missing."""
        stream = self._client.jetstream()
        await ensure_streams(stream, self._settings)
        await ensure_broadcast_consumer(stream, self._names)
        self._consumer = await ensure_targeted_consumer(stream, self._names, self._worker_id)

    async def _take(self, pull: Pull, priority: int) -> None:
        while True:
            free = self._room("") - self.waiting
            if free <= 0:
                if priority == BROADCAST:  # asked for while there was room; another worker may have some
                    await self._give_back(pull)
                self.freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TAKE_SECONDS):
                        await self.freed.wait()
                continue
            try:
                messages = await pull.take(free, TAKE_SECONDS)
            except (nats.errors.Error, OSError) as error:
                logger.debug("taking commands: %r", error)
                await asyncio.sleep(TAKE_SECONDS / 4)
                if isinstance(error, ConsumerGoneError):
                    with contextlib.suppress(nats.errors.Error, OSError):
                        await self._furnish()
                continue
            for message in messages:
                await self._offer(message, priority)

    async def _give_back(self, pull: Pull) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            for message in pull.left():
                await message.nak(delay=REFUSED_SECONDS)

    async def _offer(self, message: Msg, priority: int) -> None:
        try:
            notice = Notice.model_validate_json(message.data)
        except ValidationError as error:
            logger.error("not a notice of a command, dropped: %s", error.errors(include_url=False)[0]["msg"])
            await message.term()
            return
        if priority == BROADCAST and self._room(notice.tool_kind) <= self.waiting:
            await message.nak(delay=REFUSED_SECONDS)
            return
        self._queue.put_nowait((priority, next(self._order), Offer(notice, message)))
