"""The one way in which infrastructure that is away is tried again: PostgreSQL, NATS, the HTTP API.

Pauses double up to a bound and are drawn at random below it, so that what waited for one server together does
not come back together. What a playbook asks for in its own ``retry`` policies is no business of this module, and
neither is looking again and again for something that is not there yet.
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

Note = Callable[[BaseException, float], Awaitable[None] | None]
"""Told of each failure and of the seconds until the next try."""

FIRST_PAUSE_SECONDS = 0.1
SHORTEST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Patience:
    """What is tried again, and for how long.

    Attributes:
        failures: of the connection or of chance; everything else is raised at once.
        final: kinds of ``failures`` that are raised at once all the same.
        seconds: from the first failure; the latest one is raised when the next try would come later. None: for ever.
        longest_pause: in seconds. A failure's own ``retry_after``, where its peer asked for one, counts up to here.
    """

    failures: tuple[type[BaseException], ...]
    final: tuple[type[BaseException], ...] = ()
    seconds: float | None = None
    longest_pause: float = 5.0

    def covers(self, error: BaseException) -> bool:
        """Whether a failure is worth another try."""
        return isinstance(error, self.failures) and not isinstance(error, self.final)


async def patiently(work: Callable[[], Awaitable[T]], patience: Patience, *, note: Note | None = None) -> T:
    """Does work again and again until it succeeds.

    Args:
        work: may be done twice: it may have succeeded although its answer was lost.

    Raises:
        BaseException: of the latest try, when it is not covered or the time is over.
    """
    try:
        return await work()  # the library starts with the first failure: its own calls cost 0.1 ms each
    except Exception as error:
        if not patience.covers(error):
            raise
        first: list[BaseException] = [error]

    async def attempt() -> T:
        if first:
            raise first.pop()
        return await work()

    async def tell(state: RetryCallState) -> None:
        if note is None:
            return
        telling = note(_failure(state), state.upcoming_sleep)
        if inspect.isawaitable(telling):
            await telling

    retrying = AsyncRetrying(
        retry=retry_if_exception(patience.covers),
        wait=_Pause(patience.longest_pause),
        stop=stop_never if patience.seconds is None else stop_before_delay(patience.seconds),
        before_sleep=tell,
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
    assert error is not None, "only failures are tried again"
    return error
