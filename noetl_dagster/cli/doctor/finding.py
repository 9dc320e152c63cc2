"""The findings of checks, which run side by side, each for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

SECONDS = 15.0
"""How long a check may take, unless it says otherwise."""


class FindingState(StrEnum):
    """The state of a checked thing; only ``wrong`` makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found, and where something is wrong, what to do."""

    state: FindingState
    what: str
    remedy: str = ""


def ok(what: str) -> Finding:
    """Returns a finding that is fine."""
    return Finding(FindingState.OK, what)


def warning(what: str, remedy: str) -> Finding:
    """Returns a warning."""
    return Finding(FindingState.WARNING, what, remedy)


def wrong(what: str, remedy: str) -> Finding:
    """Returns a finding that makes the command fail."""
    return Finding(FindingState.WRONG, what, remedy)


def not_set(what: str) -> Finding:
    """Returns the finding for settings that are not set."""
    return Finding(FindingState.NOT_SET, what)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try.

    Attributes:
        name: of the thing.
        run: tries it; what it raises is wrong.
        remedy: what to do about what it raises.
        seconds: how long it may take.
    """

    name: str
    run: Callable[[], Awaitable[Finding]]
    remedy: str
    seconds: float = SECONDS

    async def find(self) -> Finding:
        """Runs the check; errors and timeouts become findings."""
        try:
            async with asyncio.timeout(self.seconds) as limit:
                return await self.run()
        except Exception as error:
            if limit.expired():
                return wrong(f"no answer within {self.seconds:g} s", self.remedy)
            return wrong(_one_line(error), self.remedy)


def _one_line(error: Exception) -> str:
    """Returns an error as one line without its remedy, since the check has its own."""
    text = " ".join(str(error).split()).partition("; check ")[0]
    return text or type(error).__name__


async def in_background(function: Callable[[], T]) -> T:
    """Runs a blocking function in a thread that does not keep the process from ending if it never returns."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            result, failure = function(), None
        except Exception as error:
            result, failure = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await answer


def place_of(url: str) -> str:
    """Returns the hosts, ports and path of an address, without its secrets."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2] or '?'}{parts.path.rstrip('/')}"


async def connects(url: str, default_port: int) -> str:
    """Opens a connection to the host of an address and closes it; gives the place.

    Raises:
        OSError: nothing listens there.
    """
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port or default_port)
    writer.close()
    return f"{parts.hostname}:{parts.port or default_port}"
