"""How long shared work waits for more of it: the longer, the more senders there are."""

from __future__ import annotations

import time

SECONDS_A_SENDER = 0.001
MOST_SECONDS = 0.1
SPAN_SECONDS = 1.0


class BatchPause:
    """The pause between two batches, so that the requests of many senders share a statement.

    It is 1 ms for each sender of the last seconds, and at most 100 ms. A few senders hardly wait: they send as much as
    they have at once. After a quiet time, nothing waits.
    """

    def __init__(self) -> None:
        self._senders: set[str] = set()
        self._earlier = 0
        self._since = self._begun = float("-inf")

    def note(self, sender: str) -> None:
        """Counts a sender."""
        now = time.monotonic()
        if now - self._since > SPAN_SECONDS:
            self._earlier = len(self._senders) if now - self._since <= 2 * SPAN_SECONDS else 0
            self._senders.clear()
            self._since = now
        self._senders.add(sender)

    def begin(self) -> None:
        """Notes that a batch begins."""
        self._begun = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next batch should begin; 0 if now."""
        senders = max(len(self._senders), self._earlier)
        wait = min(senders * SECONDS_A_SENDER, MOST_SECONDS)
        return max(self._begun + wait - time.monotonic(), 0.0)
