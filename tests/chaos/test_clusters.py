"""Failovers of PostgreSQL and losses of NATS servers in runs of several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign, Plan
from tests.chaos.clusters import ClusteredMachine
from tests.chaos.test_seeds import assert_whole

PLANS = (
    "pool: fail over at event 0.1 for 0.5 s; kill leader of nats at event 0.1 for 0.5 s",
    "pool: kill majority of nats at event 0.2 for 2.0 s; fail over and kill driver at event 0.1 for 1.0 s",
    "inline: fail over at event 0.2 for 0.0 s; fail over and kill driver at event 0.2 for 0.5 s",
    "dagster: fail over at event 0.3 for 0.5 s",
    "cursor: fail over at event 0.3 for 0.5 s",
    "sinks: fail over at event 0.3 for 0.5 s",
)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    opened = Campaign(make=ClusteredMachine)
    yield opened
    opened.close()


@pytest.mark.chaos
@pytest.mark.parametrize("plan", PLANS)
def test_runs_continue(campaign: Campaign, plan: str) -> None:
    assert_whole(campaign, Plan.of(plan))
