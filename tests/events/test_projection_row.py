"""Rows of the projection whatever the order in which transactions commit, without a database."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest

from noetl_dagster.events.projection_row import ProjectedExecution
from noetl_dagster.events.types import EventType

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def applied(*events: tuple[EventType, dict[str, Any]]) -> ProjectedExecution:
    """Applies events of the step ``work``, whose ids ascend unless they have one."""
    row, ids = ProjectedExecution(1), count(1)
    unset = dict.fromkeys(
        ("catalog_id", "parent_execution_id", "workload", "error", "result_uri", "status", "collection_ref")
    )
    for type_, values in events:
        event = {
            **unset,
            "event_id": next(ids),
            "event_type": type_,
            "node_name": "work",
            "created_at": NOW,
            "meta": {},
        }
        row.apply([{**event, **values}], {})
    return row


STARTED = (
    EventType.LOOP_STARTED,
    {"meta": {"visit": 1, "loop_id": "L", "collection_size": 9, "mode": "parallel"}},
)
FAILED = (EventType.COMMAND_FAILED, {"meta": {"visit": 1, "loop_id": "L", "final": True}})


def entered(visit: int, **values: Any) -> tuple[EventType, dict[str, Any]]:
    return EventType.STEP_ENTER, {"meta": {"visit": visit}, **values}


@pytest.mark.parametrize("status", ["COMPLETED", "FAILED"])
def test_the_end_of_an_earlier_visit_changes_nothing(status: str) -> None:
    late = (EventType.STEP_EXIT, {"meta": {"visit": 1}, "status": status, "error": "of the first visit"})
    [step] = applied(entered(1), entered(2), late).state["steps"]
    assert (step["status"], step["visits"], step.get("error")) == ("RUNNING", 2, None)


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([entered(1, event_id=7), entered(1, event_id=3)], 7),
        ([entered(1), STARTED, FAILED], 2),  # iterations are counted
    ],
)
def test_the_last_event_is_the_latest_that_is_not_of_an_iteration(events: list[Any], last: int) -> None:
    assert applied(*events).last_event_id == last
