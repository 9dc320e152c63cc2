"""A proxy between a worker and the HTTP API that takes requests on and may swallow the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

CHUNK = 2**16

Swallows = Callable[[bytes], bool]
"""Whether the connection is cut in the place of the answer to a request, of which the beginning is given.

Raises:
    ConnectionError: it is cut before the request has arrived.
"""


@asynccontextmanager
async def cutting(url: str, swallows: Swallows) -> AsyncIterator[str]:
    """Stands before a server until the block ends; gives its own address."""
    there = urlsplit(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: list[bool]) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK):
                if chunk.startswith((b"POST ", b"GET ")):
                    answers[:] = [swallows(chunk)]
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def pump_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: list[bool]) -> None:
        with suppress(OSError):
            while (chunk := await reader.read(CHUNK)) and not any(answers):
                writer.write(chunk)
                await writer.drain()
        writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection(there.hostname, there.port)
        except OSError:
            writer.transport.abort()
            return
        answers: list[bool] = []
        pumps = [asyncio.create_task(one) for one in (pump(reader, forth, answers), pump_back(back, writer, answers))]
        try:
            await asyncio.wait(pumps)
        finally:
            for task in pumps:
                task.cancel()
            forth.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
