"""Series of samples, and whether they stay flat."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

LEAST_SAMPLES = 6
"""Fewer samples in the second half prove nothing."""

SIGNIFICANT = 3.0
"""A slope counts if it is this many times its standard error."""


class Verdict(StrEnum):
    """Whether a series stays flat.

    Attributes:
        SHORT: too few samples.
        SHOWN: the series is shown for information and has no verdict.
    """

    FLAT = "flat"
    GROWING = "growing"
    SHORT = "too short"
    SHOWN = "not judged"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much a series may grow within the second half of a run: the larger of both.

    Attributes:
        share: of its mean.
        amount: in the unit of the series.
    """

    share: float = 0.1
    amount: float = 0.0

    def of(self, mean: float) -> float:
        return max(self.share * abs(mean), self.amount)


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through samples: units a second, and the standard error of that."""

    slope: float
    error: float


@dataclass(slots=True)
class Series:
    """Samples of one measurement.

    Attributes:
        tolerance: None: the series has no verdict.
        seconds: of each sample, since the begin of the run.
    """

    name: str
    unit: str = ""
    tolerance: Tolerance | None = None
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, second: float, value: float) -> None:
        self.seconds.append(second)
        self.values.append(value)

    def between(self, first: float, last: float) -> list[float]:
        """Returns the samples of a part of the run; ``first`` and ``last`` are shares of its time."""
        begin, end = self.seconds[0], self.seconds[-1]
        low, high = (begin + share * (end - begin) for share in (first, last))
        return [value for at, value in zip(self.seconds, self.values, strict=True) if low <= at <= high]

    def level(self, share: float) -> float:
        """Returns the median of the tenth of the run around a share of its time."""
        return statistics.median(self.between(share - 0.05, share + 0.05) or [self.values[0]])

    @property
    def second_half(self) -> tuple[list[float], list[float]]:
        middle = (self.seconds[0] + self.seconds[-1]) / 2
        found = [(at, value) for at, value in zip(self.seconds, self.values, strict=True) if at >= middle]
        return [at for at, _ in found], [value for _, value in found]

    @property
    def growth(self) -> float:
        """How much the fitted line rises within the second half."""
        seconds, values = self.second_half
        return fit(seconds, values).slope * (seconds[-1] - seconds[0])

    @property
    def allowed(self) -> float | None:
        """How much the series may grow within the second half."""
        if self.tolerance is None:
            return None
        return self.tolerance.of(statistics.fmean(self.second_half[1]))

    @property
    def verdict(self) -> Verdict:
        """A series grows if the line through its second half rises by more than allowed, and by more than its noise."""
        if self.tolerance is None or self.allowed is None:
            return Verdict.SHOWN
        seconds, values = self.second_half
        if len(seconds) < LEAST_SAMPLES:
            return Verdict.SHORT
        found = fit(seconds, values)
        grows = self.growth > self.allowed and found.slope > SIGNIFICANT * found.error
        return Verdict.GROWING if grows else Verdict.FLAT


def fit(seconds: Sequence[float], values: Sequence[float]) -> Fit:
    """Returns the line of least squares; a flat one for fewer than three samples."""
    if len(seconds) < 3 or seconds[0] == seconds[-1]:
        return Fit(0.0, 0.0)
    line = statistics.linear_regression(seconds, values)
    middle = statistics.fmean(seconds)
    squares = sum((at - middle) ** 2 for at in seconds)
    rest = sum((value - line.intercept - line.slope * at) ** 2 for at, value in zip(seconds, values, strict=True))
    return Fit(line.slope, math.sqrt(rest / (len(seconds) - 2) / squares))
