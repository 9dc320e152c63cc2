"""The real log does what the model does: in each step of small sizes, and in long walks through larger ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from noetl_dagster.events.connection import open_pool
from noetl_dagster.settings import Settings
from tests.events.model.conformance import Walk, conform, replay
from tests.events.model.one_pool import OnePool
from tests.events.model.rules import Model
from tests.events.model.states import Sizes

SMALL = [Sizes(claims=2, epochs=1)]
LARGE = [
    Sizes(claims=1, epochs=2),
    Sizes(claims=2, epochs=1, releases=1),
    Sizes(claims=1, epochs=1, extras=True),
    Sizes(items=2, claims=1, epochs=1),
    Sizes(claims=1, epochs=1, visits=2),
    Sizes(claims=2, epochs=1, withdrawals=1),
]
TWICE = "enter 1 1, start 1 1 1, issue 1 0 1, enqueue 1 0 1, claim 1 0 1, lapse 1 0 1, reap, claim 1 0 1"
SEQUENCES = {
    "a batch with two ends of a claim": (
        Sizes(claims=2),
        f"{TWICE}, end 1 0 1 by 2 failed & end 1 0 1 by 2 done",
    ),
    "a batch with the ends of two claims": (
        Sizes(claims=2),
        f"{TWICE}, end 1 0 1 by 1 failed & end 1 0 1 by 2 done & end 1 0 1 by 2 done",
    ),
    "a batch that issues a command twice": (Sizes(claims=2), "enter 1 1, start 1 1 1, issue 1 0 1 & issue 1 0 1"),
    "a claim that is released when another process has queued it again": (
        Sizes(claims=2, releases=1),
        "enter 1 1, start 1 1 1, issue 1 0 1, enqueue 1 0 1, claim 1 0 1, lapse 1 0 1, reap, release 1 0 1 by 1",
    ),
    "a claim that is released": (
        Sizes(claims=2, releases=1),
        f"{TWICE}, release 1 0 1 by 2, claim 1 0 1, lapse 1 0 1, reap",
    ),
    "chunks and dead letters": (
        Sizes(claims=2, extras=True),
        f"{TWICE}, chunk 1 0 1 by 1, chunk 1 0 1 by 2, chunk 1 0 1 by 2, bury 1 0 1 by 1, bury 1 0 1 by 1, bury 1 0 1 by 2, "
        "unearth 1 0 1 by 1, unearth 1 0 1 by 2, end 1 0 1 by 2 done, chunk 1 0 1 by 1, chunk 1 0 1 by 2",
    ),
    "a chunk that two claims send": (
        Sizes(claims=2, extras=True),
        f"{TWICE.partition(', lapse')[0]}, chunk 1 0 1 by 1, lapse 1 0 1, reap, claim 1 0 1, chunk 1 0 1 by 2",
    ),
    "a driver that was late ends no later epoch": (
        Sizes(attempts=1, claims=1, epochs=2),
        "enter 1 1, start 1 1 1, issue 1 0 1, enqueue 1 0 1, claim 1 0 1, end 1 0 1 by 1 done, end_loop 1 1, exit 1 1 done, "
        "resume 1, finish 1 completed",
    ),
    "a late failure does not undo the end of a visit": (
        Sizes(attempts=1, claims=1, epochs=2),
        "enter 1 1, start 1 1 1, issue 1 0 1, enqueue 1 0 1, claim 1 0 1, end 1 0 1 by 1 failed, end_loop 1 1, resume 1, "
        "enter 1 2, start 1 2 2, issue 1 0 2, enqueue 1 0 2, claim 1 0 2, end 1 0 2 by 1 done, end_loop 1 2, exit 1 2 done, "
        "exit 1 1 failed, finish 2 completed",
    ),
}
"""Sequences that small sizes do not have, and the last two, which once led to a difference."""

WALKS = [
    Sizes(items=3, attempts=2, claims=3, epochs=3, releases=3, withdrawals=2),
    Sizes(items=2, visits=2, claims=2, epochs=2, releases=2, extras=True),
]


@contextmanager
def transaction(settings: Settings) -> Iterator[tuple[asyncio.AbstractEventLoop, OnePool]]:
    """Opens a transaction, which is rolled back."""
    assert settings.db_url is not None
    loop = asyncio.new_event_loop()
    pool = loop.run_until_complete(open_pool(settings.db_url, size=1))
    connection = loop.run_until_complete(pool.acquire())
    opened: asyncpg.transaction.Transaction = connection.transaction()
    loop.run_until_complete(opened.start())
    try:
        yield loop, OnePool(connection)
    finally:
        loop.run_until_complete(opened.rollback())
        loop.run_until_complete(pool.release(connection))
        loop.run_until_complete(pool.close())
        loop.close()


@pytest.mark.parametrize("fanout", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["loop", "fanout"])
@pytest.mark.parametrize("size", [*SMALL, *(pytest.param(one, marks=pytest.mark.slow) for one in LARGE)])
def test_every_step_of_the_model_is_a_step_of_the_log(settings: Settings, size: Sizes, fanout: bool) -> None:
    with transaction(settings) as (loop, pool):
        assert loop.run_until_complete(conform(settings, pool, Model(size), fanout=fanout)) > 500


@pytest.mark.parametrize(("size", "actions"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_sequence(settings: Settings, size: Sizes, actions: str) -> None:
    with transaction(settings) as (loop, pool):
        loop.run_until_complete(replay(settings, pool, Model(size), actions))


@pytest.mark.parametrize("examples", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_the_order_the_log_and_the_model_agree(settings: Settings, examples: int) -> None:
    """Issues and messages arrive in batches, again and late, from drivers and workers of any age."""
    with transaction(settings) as (loop, pool):

        @hypothesis_settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(WALKS), st.booleans(), st.data())
        def walk(size: Sizes, fanout: bool, data: st.DataObject) -> None:
            walking = Walk(settings, pool, Model(size), fanout=fanout)
            loop.run_until_complete(walking.go(lambda choices: data.draw(st.sampled_from(choices)), steps=40))

        walk()
