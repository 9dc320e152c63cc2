"""Plans that once found a defect, and those of a sample that runs by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign, Outcome, Plan

FAILED: list[str] = []
"""Plans, as ``python -m tests.chaos`` prints them."""

SAMPLE = (
    "pool: kill driver at cut event 0.1 for 0.0 s; kill worker over nats at event 0.05 for 0.1 s; "
    "kill postgres at event 0.05 for 0.1 s"
)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    opened = Campaign()
    yield opened
    opened.close()


def test_a_sample(campaign: Campaign) -> None:
    plan = Plan.of(SAMPLE)
    assert str(plan) == SAMPLE
    outcome = assert_whole(campaign, plan)
    hits = [hit.fault for hit in outcome.hits]
    assert len(hits) > 1, "the workers may end the flow before the last faults"
    assert hits == [fault.name for strike in plan.strikes for fault in strike.faults][: len(hits)]
    assert campaign.exposed() == []


@pytest.mark.chaos
@pytest.mark.parametrize("plan", FAILED)
def test_a_plan_that_found_a_defect(campaign: Campaign, plan: str) -> None:
    assert_whole(campaign, Plan.of(plan))


def assert_whole(campaign: Campaign, plan: Plan) -> Outcome:
    outcome = campaign.carry_out(plan)
    assert outcome.defects == [], f"{plan}\n{outcome.said}"
    return outcome
