"""What is to go up to the object store, sent by a thread that lives while there is something to send."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Uploads:
    """Sends compute logs one after another, beside whoever goes on.

    Its thread is no daemon: a process does not end before everything was sent, or given up.

    Args:
        send: sends what a key means; an error of it is a warning in the log.
    """

    def __init__(self, send: Callable[[Sequence[str]], None]) -> None:
        self._send = send
        self._waiting: deque[Sequence[str]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, key: Sequence[str]) -> None:
        with self._lock:
            self._waiting.append(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compute-logs-up", daemon=False)
                self._thread.start()

    def wait(self) -> None:
        """Until everything was sent."""
        while (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                key = self._waiting.popleft()
            try:
                self._send(key)
            except Exception as error:
                logger.warning(
                    "compute logs %s are on this machine only: %s: %s",
                    "/".join(key),
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
