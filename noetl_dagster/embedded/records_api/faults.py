"""Injected faults: a share of the requests fails, and retries succeed.

The fault of an attempt depends on the seed, the request and the attempt number that the client sends as ``X-Attempt``.
The service is stateless, and a run with the same seed meets the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from noetl_dagster.embedded.records_api.records import mix, number_of, share

WORST_STREAK = 3
"""Maximum number of consecutive faults of one request; attempt ``WORST_STREAK + 1`` always succeeds."""


class Fault(StrEnum):
    """The kinds of faults."""

    THROTTLED = "throttled"  # 429 with Retry-After
    BROKEN = "broken"  # 500
    SLOW = "slow"  # the right answer, late
    DROPPED = "dropped"  # the connection closes within the body


_KINDS = tuple(Fault)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Decides which requests fail.

    Attributes:
        share: share of attempts that fail, 0 to 1; the four kinds are equally frequent.
        slow_seconds: delay of a slow answer.
        retry_after: whole seconds that a throttled client should wait.
    """

    seed: int
    share: float = 0.0
    slow_seconds: float = 0.25
    retry_after: int = 1

    def fault(self, request: str, attempt: int) -> Fault | None:
        """Returns the fault of attempt ``attempt`` (from 1) of a request (its path and query), or None."""
        if not self.share or attempt > WORST_STREAK:
            return None
        bits = mix(self.seed, number_of(request), attempt)
        if share(bits) >= self.share:
            return None
        return _KINDS[mix(bits) % len(_KINDS)]
