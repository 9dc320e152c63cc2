"""Checks of everything that the settings name, which run side by side, each for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

SECONDS = 15.0
"""Default time limit of a check."""

DAGSTER_REMEDY = "check NOETL_DAGSTER_DB_URL, or dagster.yaml in DAGSTER_HOME"


class CheckState(StrEnum):
    """The state of a checked thing; only ``wrong`` makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the report: what was found, and the remedy if something is wrong."""

    state: CheckState
    what: str
    remedy: str = ""


ok = partial(CheckResult, CheckState.OK)
warning = partial(CheckResult, CheckState.WARNING)
wrong = partial(CheckResult, CheckState.WRONG)
not_set = partial(CheckResult, CheckState.NOT_SET)


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one thing, which returns a finding or raises; ``remedy`` is for what it raises."""

    name: str
    run: Callable[[], Awaitable[CheckResult]]
    remedy: str
    seconds: float = SECONDS

    async def find(self) -> CheckResult:
        """Runs the check; errors and timeouts become findings."""
        try:
            async with asyncio.timeout(self.seconds) as limit:
                return await self.run()
        except Exception as error:
            if limit.expired():
                return wrong(f"no answer within {self.seconds:g} s", self.remedy)
            # without the error's own remedy
            what = " ".join(str(error).split()).partition("; check ")[0]
            return wrong(what or type(error).__name__, self.remedy)


async def in_background(function: Callable[[], T]) -> T:
    """Runs a blocking function in a daemon thread, so that the process can end even if it never returns."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # a timeout cannot cancel it any more

    def work() -> None:
        try:
            result = function()
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await asyncio.wrap_future(answer)


def place_of(url: str) -> str:
    """Returns the hosts, ports and path of an address without its secrets."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2] or '?'}{parts.path.rstrip('/')}"


async def connects(url: str, default_port: int) -> str:
    """Opens a connection to the host of an address, closes it, and returns host and port; raises ``OSError``."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port or default_port)
    writer.close()
    return f"{parts.hostname}:{parts.port or default_port}"
