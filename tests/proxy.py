"""Proxies between processes and servers: they take requests on, and disturb what passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

CHUNK = 2**16

Swallows = Callable[[bytes], bool]
"""Whether the connection is cut in the place of the answer to a request, of which the beginning is given.

Raises:
    ConnectionError: it is cut before the request has arrived.
"""

Answers = Callable[[bytes], "Answer | None"]
"""How a request over HTTP is answered, of which the beginning is given; None: as the server does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A disturbed answer to a request over HTTP.

    Attributes:
        instead: these bytes in its place; the server does not see the request.
        stops_after: bytes of it that pass before the connection is cut.
        damages: whether a byte of its body is another one.
        seconds: it is late by this much.
        twice: whether the server gets the request twice, and the client the second answer.
    """

    instead: bytes | None = None
    stops_after: int | None = None
    damages: bool = False
    seconds: float = 0.0
    twice: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happens to all connections, and to new ones.

    Attributes:
        is_cut: connections end, and new ones are refused.
        is_silent: connections are accepted and stay, and nothing passes.
        seconds: each piece is late by this much.
        bytes_per_second: a limit on each direction of each connection; None: no limit.
        swallows: see :data:`Swallows`.
        answers: see :data:`Answers`.
    """

    is_cut: bool = False
    is_silent: bool = False
    seconds: float = 0.0
    bytes_per_second: float | None = None
    swallows: Swallows | None = None
    answers: Answers | None = None


UNDISTURBED = Traffic()


class Proxy:
    """Stands before a server. Methods run in the event loop that :meth:`open` was awaited in.

    Attributes:
        traffic: what happens now; :meth:`change` sets it.
        port: on which it listens, once it is open.
    """

    def __init__(self, host: str | None, port: int | None, traffic: Traffic = UNDISTURBED) -> None:
        self._there = host, port
        self.traffic = traffic
        self.port = 0
        self._flows = asyncio.Event()  # cleared while nothing passes
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut()

    def change(self, traffic: Traffic) -> None:
        """Disturbs connections in another way, those that are open too."""
        self.traffic = traffic
        (self._flows.clear if traffic.is_silent else self._flows.set)()
        if traffic.is_cut:
            self._cut()

    def _cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.traffic.is_cut:
            writer.transport.abort()
            return
        try:
            back, forth = await asyncio.open_connection(*self._there)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, forth}
        due: list[Answer] = []
        pumps = [
            asyncio.create_task(one)
            for one in (self._requests(reader, forth, writer, due), self._answers(back, writer, due))
        ]
        try:
            await asyncio.wait(pumps)
        finally:
            for task in pumps:
                task.cancel()
            forth.close()
            writer.close()
            self._writers -= {writer, forth}

    async def _requests(
        self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter, writer: asyncio.StreamWriter, due: list[Answer]
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK):
                if chunk.startswith((b"POST ", b"GET ", b"PUT ", b"HEAD ", b"DELETE ")):
                    due[:] = self._disturbed(chunk)
                if any(one.instead is not None for one in due):
                    writer.write(next(one.instead for one in due if one.instead is not None))
                    await writer.drain()
                    break
                if any(one.twice for one in due):
                    await self._once_before(chunk)
                    due.clear()
                await self._pass(chunk, forth)
        forth.close()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, due: list[Answer]) -> None:
        passed = 0
        with suppress(OSError):
            while chunk := await back.read(CHUNK):
                for answer in due:
                    await asyncio.sleep(answer.seconds)
                    if answer.damages and (start := chunk.find(b"\r\n\r\n") + 4) < len(chunk):
                        middle = (start + len(chunk)) // 2 if start > 3 else len(chunk) // 2
                        chunk = chunk[:middle] + bytes([chunk[middle] ^ 1]) + chunk[middle + 1 :]
                    if answer.stops_after is not None:
                        chunk = chunk[: answer.stops_after - passed]
                passed = passed + len(chunk) if due else 0
                if chunk:
                    await self._pass(chunk, writer)
                if any(one.stops_after is not None and passed >= one.stops_after for one in due):
                    break
        if any(one.instead is not None for one in due):  # it is on its way
            with suppress(OSError):
                await writer.drain()
            writer.close()
        else:
            writer.transport.abort()

    def _disturbed(self, request: bytes) -> list[Answer]:
        found = None if self.traffic.answers is None else self.traffic.answers(request)
        if self.traffic.swallows is not None and self.traffic.swallows(request):
            found = Answer(stops_after=0)
        return [] if found is None else [found]

    async def _pass(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        if self.traffic.seconds:
            await asyncio.sleep(self.traffic.seconds)
        await self._flows.wait()
        if self.traffic.bytes_per_second is not None:
            await asyncio.sleep(len(chunk) / self.traffic.bytes_per_second)
        writer.write(chunk)
        await writer.drain()

    async def _once_before(self, request: bytes) -> None:
        """Sends a request on a connection of its own, and waits for the beginning of its answer."""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._there)
            writer.write(request)
            await reader.read(CHUNK)
            writer.close()


@asynccontextmanager
async def cutting(url: str, swallows: Swallows) -> AsyncIterator[str]:
    """Stands before a server until the block ends; gives its own address."""
    there = urlsplit(url)
    proxy = Proxy(there.hostname, there.port, Traffic(swallows=swallows))
    await proxy.open()
    try:
        yield f"http://127.0.0.1:{proxy.port}"
    finally:
        proxy.close()
