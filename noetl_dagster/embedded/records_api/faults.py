"""Injected faults, as a function of the request: a share of requests fails, and retrying helps.

Whether an attempt faults depends on the seed, the request and the number of the attempt that the client
sends as ``X-Attempt``. No state is kept, and a run repeated with the same seed meets the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from noetl_dagster.embedded.records_api.mixing import mix, number_of, share

WORST_STREAK = 3
"""Faults in a row that one request may meet; attempt ``WORST_STREAK + 1`` always succeeds."""


class Fault(StrEnum):
    THROTTLED = "throttled"  # 429 with Retry-After
    BROKEN = "broken"  # 500
    SLOW = "slow"  # the right answer, late
    DROPPED = "dropped"  # the connection closes within the body


_KINDS = tuple(Fault)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which requests fault.

    Attributes:
        share: of attempts that fault, 0 to 1; the four kinds are equally frequent.
        slow_seconds: how late a slow answer is.
        retry_after: whole seconds that a throttled client is asked to wait.
    """

    seed: int
    share: float = 0.0
    slow_seconds: float = 0.25
    retry_after: int = 1

    def fault(self, request: str, attempt: int) -> Fault | None:
        """What befalls attempt ``attempt`` (from 1) of a request (its path and query), if anything."""
        if not self.share or attempt > WORST_STREAK:
            return None
        bits = mix(self.seed, number_of(request), attempt)
        if share(bits) >= self.share:
            return None
        return _KINDS[mix(bits) % len(_KINDS)]
