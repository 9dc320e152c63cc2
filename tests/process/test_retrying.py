"""Infrastructure that is away is tried again, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest

from noetl_dagster.process.retrying import FIRST_PAUSE_SECONDS, RetryLimits, with_retries
from tests.waiting import PATIENCE_SECONDS


class Failing:
    """Work that raises the given errors one after another and then succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.tries = 0

    async def __call__(self) -> int:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.tries


async def test_until_it_succeeds() -> None:
    noted: list[tuple[str, float]] = []
    work = Failing(ConnectionResetError("one"), BrokenPipeError("two"))
    answer = await with_retries(
        work, RetryLimits((OSError,)), on_failure=lambda error, pause: noted.append((str(error), pause))
    )
    assert answer == 3
    assert [text for text, _ in noted] == ["one", "two"]
    assert all(0 < pause <= 2 * FIRST_PAUSE_SECONDS for _, pause in noted)


async def test_a_note_may_take_its_time() -> None:
    told = asyncio.Event()

    async def note(error: BaseException, pause: float) -> None:
        await asyncio.sleep(0)
        told.set()

    assert await with_retries(Failing(OSError()), RetryLimits((OSError,)), on_failure=note) == 2
    assert told.is_set()


@pytest.mark.parametrize("error", [ValueError("no"), PermissionError("never")])
async def test_what_is_not_covered_is_raised_at_once(error: Exception) -> None:
    for before in ([], [OSError("away")]):
        work = Failing(*before, error)
        with pytest.raises(type(error)) as raised:
            await with_retries(work, RetryLimits((OSError,), final=(PermissionError,)))
        assert raised.value is error
        assert work.tries == len(before) + 1


async def test_the_latest_failure_is_raised_when_the_time_is_over() -> None:
    async def away() -> NoReturn:
        raise ConnectionRefusedError("still away")

    started = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match="still away"):
        await with_retries(away, RetryLimits((OSError,), seconds=0.4, longest_pause=0.1))
    assert 0.2 < time.monotonic() - started < PATIENCE_SECONDS


async def test_pauses_grow_up_to_the_longest() -> None:
    pauses: list[float] = []
    work = Failing(*(OSError(str(count)) for count in range(40)))
    await with_retries(
        work, RetryLimits((OSError,), longest_pause=0.05), on_failure=lambda _, pause: pauses.append(pause)
    )
    assert max(pauses) <= 0.05
    assert len(set(pauses)) > 30  # drawn at random: what failed together does not come back together


class Busy(OSError):
    retry_after = 0.3


async def test_a_peer_may_ask_for_a_longer_pause() -> None:
    pauses: list[float] = []
    await with_retries(Failing(Busy()), RetryLimits((OSError,)), on_failure=lambda _, pause: pauses.append(pause))
    await with_retries(
        Failing(Busy()),
        RetryLimits((OSError,), longest_pause=0.1),
        on_failure=lambda _, pause: pauses.append(pause),
    )
    assert pauses[0] == pytest.approx(0.3)
    assert pauses[1] == pytest.approx(0.1)


async def test_a_cancellation_ends_it() -> None:
    async def away() -> NoReturn:
        raise OSError

    task = asyncio.create_task(with_retries(away, RetryLimits((OSError,), longest_pause=30)))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
