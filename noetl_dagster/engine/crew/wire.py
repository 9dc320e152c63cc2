"""Messages between the processes of a run: JSON objects over a socket, each with its length before it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import orjson

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")


class Line:
    """One end of a connection. Messages are small and few: sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> Line:
        return cls(*await asyncio.open_unix_connection(sock=connected))

    def send(self, message: Message) -> None:
        """Sends, or does nothing when the other end is gone: whoever receives finds that out."""
        if not self._writer.is_closing():
            self._writer.write(packed(message))

    async def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: Message = orjson.loads(await self._reader.readexactly(size))
            return message
        except (asyncio.IncompleteReadError, OSError):
            return None

    def close(self) -> None:
        self._writer.close()


def packed(message: Message) -> bytes:
    body = orjson.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read_message(connected: socket.socket) -> Message | None:
    """The next message, for a process without an event loop."""
    head = _read(connected, _LENGTH.size)
    body = _read(connected, *_LENGTH.unpack(head)) if head is not None else None
    if body is None:
        return None
    message: Message = orjson.loads(body)
    return message


def _read(connected: socket.socket, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        part = connected.recv(size - len(found))
        if not part:
            return None
        found += part
    return found
