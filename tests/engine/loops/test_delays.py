"""How long retries wait."""

from __future__ import annotations

import time

import pytest

from noetl_dagster.engine.loops.attempts import due
from noetl_dagster.errors import ToolError
from noetl_dagster.events.envelopes import error_envelope
from noetl_dagster.playbook.models import Backoff, RetryRule
from noetl_dagster.worker.program import JITTER, LONGEST_DELAY, delay_before


@pytest.mark.parametrize(
    ("backoff", "retries", "retry_after", "seconds"),
    [
        (Backoff.NONE, 4, None, 2.0),
        (Backoff.LINEAR, 4, None, 8.0),
        (Backoff.EXPONENTIAL, 4, None, 16.0),
        (Backoff.EXPONENTIAL, 400, None, LONGEST_DELAY),
        (Backoff.NONE, 1, 90.0, 90.0),  # as the peer asks
        (Backoff.NONE, 1, 0.5, 2.0),
    ],
)
def test_a_policys_delay(backoff: Backoff, retries: int, retry_after: float | None, seconds: float) -> None:
    assert seconds <= delay_before(backoff, 2.0, retries, retry_after=retry_after) <= seconds * (1 + JITTER)


@pytest.mark.parametrize(
    ("rule", "asked", "seconds"),
    [
        ({"delay": 10}, None, LONGEST_DELAY),
        ({"delay": 100}, None, 100),
        ({"delay": 300, "backoff": "none"}, None, 300),
        ({"delay": 100, "max_delay": 50}, None, 50),
        ({"delay": 5, "max_delay": 50}, None, 40),
        ({"delay": 30, "max_delay": 600}, None, 240),
        ({"delay": 1}, 90.0, 90),  # as the server asks
        ({"delay": 1, "max_delay": 4}, 90.0, 90),
        ({"delay": 10}, 0.5, LONGEST_DELAY),
    ],
)
def test_a_retry_blocks_delay(rule: dict[str, float], asked: float | None, seconds: float) -> None:
    one = RetryRule.model_validate({"when": "{{ error is defined }}", "backoff": "exponential", **rule})
    assert seconds <= due(one, 4, asked) - time.time() + 1 <= seconds * (1 + JITTER) + 1


def test_the_log_keeps_what_the_server_asked() -> None:
    error = ToolError("too many requests", kind="rate_limit", retry_after=2.5)
    assert error_envelope(error)["error"]["retry_after"] == 2.5
