"""Retries of infrastructure that is unavailable: PostgreSQL, NATS and the HTTP API.

Pauses double up to a limit, with jitter, so that processes that lost the same server do not return all at once. The
``retry`` policies of playbooks are not handled here, and neither is polling for something that does not exist yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_before_delay,
    stop_never,
    wait_random_exponential,
)

T = TypeVar("T")

OnFailure = Callable[[BaseException, float], Awaitable[None] | None]
"""Receives each failure, and the seconds until the next attempt."""

FIRST_PAUSE_SECONDS = 0.1
SHORTEST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Defines which failures are retried, and for how long.

    Attributes:
        failures: failures of the connection or by chance; every other exception is raised at once.
        final: subclasses of ``failures`` that are raised at once nevertheless.
        seconds: time since the first failure. The latest failure is raised when the next attempt would start later;
            None retries without end.
        longest_pause: seconds between two attempts at most. A failure's own ``retry_after`` counts up to this limit.
    """

    failures: tuple[type[BaseException], ...]
    final: tuple[type[BaseException], ...] = ()
    seconds: float | None = None
    longest_pause: float = 5.0

    def covers(self, error: BaseException) -> bool:
        """Returns True if a failure is retried."""
        return isinstance(error, self.failures) and not isinstance(error, self.final)


async def with_retries(
    work: Callable[[], Awaitable[T]], limits: RetryLimits, *, on_failure: OnFailure | None = None
) -> T:
    """Repeats work until it succeeds; raises the latest failure if ``limits`` do not cover it or the time is over.

    The work must be safe to repeat: an attempt may have succeeded although its answer was lost.
    """
    try:
        return await work()  # tenacity starts with the first failure, since each of its calls costs 0.1 ms
    except Exception as error:
        if not limits.covers(error):
            raise
        first: list[BaseException] = [error]

    async def attempt() -> T:
        if first:
            raise first.pop()
        return await work()

    async def report(state: RetryCallState) -> None:
        if on_failure is None:
            return
        reporting = on_failure(_failure(state), state.upcoming_sleep)
        if inspect.isawaitable(reporting):
            await reporting

    retrying = AsyncRetrying(
        retry=retry_if_exception(limits.covers),
        wait=_Pause(limits.longest_pause),
        stop=stop_never if limits.seconds is None else stop_before_delay(limits.seconds),
        before_sleep=report,
        reraise=True,
    )
    return await retrying(attempt)


class _Pause(wait_random_exponential):
    def __init__(self, longest: float) -> None:
        super().__init__(multiplier=FIRST_PAUSE_SECONDS, max=longest, min=SHORTEST_PAUSE_SECONDS)
        self._longest = longest

    def __call__(self, retry_state: RetryCallState) -> float:
        asked = getattr(_failure(retry_state), "retry_after", None) or 0.0
        return max(super().__call__(retry_state), min(asked, self._longest))


def _failure(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None, "only failures are retried"
    return error
