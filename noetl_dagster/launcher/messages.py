"""Messages between run servers, those who launch and drivers: JSON objects, one a line, over Unix sockets."""

from __future__ import annotations

import socket
from typing import Any

import orjson

Message = dict[str, Any]

READ_BYTES = 1 << 16


class Channel:
    """One end of a connection. Reading never blocks where the socket does not."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unread = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, whole.

        Raises:
            OSError: the other side is gone.
        """
        self.sock.sendall(orjson.dumps(message) + b"\n")

    def arrived(self) -> list[Message] | None:
        """Messages that are here after one read from the socket; None when the other side is gone."""
        try:
            more = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not more:
            return None
        *lines, self._unread = (self._unread + more).split(b"\n")
        return [orjson.loads(line) for line in lines]

    def receive(self) -> Message | None:
        """The next message, waited for; None when the other side is gone. For one message at a time."""
        while True:
            found = self.arrived()
            if found is None or found:
                return found[0] if found else None

    def close(self) -> None:
        self.sock.close()
