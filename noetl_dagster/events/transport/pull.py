"""A pull subscription that requests messages ahead, so that no message waits for a request."""

from __future__ import annotations

import asyncio
from collections import deque

import nats.errors
import orjson
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

NO_RESPONDERS = "503"
REQUEST_SECONDS = 5.0
"""Duration of a request at the server; a request lost with its connection is repeated after it."""


class ConsumerGoneError(nats.errors.Error):
    """The stream or consumer no longer exists: it was deleted, or the server lost its files."""


class Pull:
    """A pull subscription that delivers available messages at once. One task at a time may take from it.

    Args:
        ahead: messages that may be in transit or waiting here beyond the requested ones; no other subscriber
            receives these.
    """

    def __init__(self, client: NatsClient, stream: str, consumer: str, *, ahead: int = 0) -> None:
        self._client = client
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._ahead = ahead
        self._inbox = client.new_inbox()
        self._waiting: deque[Msg] = deque()
        self._credit = 0
        self._expires = 0.0
        self._arrived = asyncio.Event()
        self._gone = False
        self._subscription: object | None = None

    async def open(self) -> None:
        """Subscribes."""
        self._subscription = await self._client.subscribe(self._inbox, cb=self._receive)

    async def take(self, limit: int, patience: float) -> list[Msg]:
        """Returns up to ``limit`` messages as soon as there is one; none after ``patience`` seconds.

        Raises:
            ConsumerGoneError: the consumer must be created again; messages delivered before are returned first.
        """
        deadline = asyncio.get_running_loop().time() + patience
        while not self._waiting:
            if self._gone:
                self._gone = False
                raise ConsumerGoneError
            await self._ask(limit)
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return []
            self._arrived.clear()
            try:
                async with asyncio.timeout(remaining):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        count = min(limit, len(self._waiting))
        if self._ahead:  # asks before it takes: messages that were taken would be lost if this is cancelled
            await self._ask(limit, taken=count)
        return [self._waiting.popleft() for _ in range(count)]

    async def close(self) -> list[Msg]:
        """Ends the subscription and returns the messages that were not taken."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()  # type: ignore[attr-defined]
        left = list(self._waiting)
        self._waiting.clear()
        return left

    async def _ask(self, limit: int, taken: int = 0) -> None:
        """Requests more unless enough messages are in transit, when ``taken`` of those that wait are taken."""
        now = asyncio.get_running_loop().time()
        if self._credit > 0 and now > self._expires:
            self._credit = 0
        waiting = len(self._waiting) - taken
        room = limit + self._ahead - self._credit - waiting
        if room <= self._ahead // 2 and (self._credit or waiting):  # a request for each message costs too
            return
        self._credit += room
        self._expires = now + REQUEST_SECONDS + 1.0
        body = {"batch": room, "expires": int(REQUEST_SECONDS * 1e9)}
        await self._client.publish(self._request, orjson.dumps(body), reply=self._inbox)

    async def _receive(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status") if not message.data else None
        if status is None:
            self._credit -= 1
            self._waiting.append(message)
        elif status != "100":  # the request is over: expired, or the consumer is not there
            left = headers.get("Nats-Pending-Messages")
            self._credit = max(self._credit - int(left), 0) if left else 0
            self._gone = status == NO_RESPONDERS or "Deleted" in headers.get("Description", "")
        self._arrived.set()
