"""Charts as SVG, with attributes and classes only: a page allows no styles in its markup."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from markupsafe import Markup

from noetl_dagster.engine.executions.progress import brief

WIDTH, LABEL, ROW = 900, 190, 20
EDGE = 26

MOST_VISITS = 60
"""Visits that a waterfall draws, the latest ones."""


class TimeBar(NamedTuple):
    """A bar of a waterfall. ``end`` None: it still runs; ``status`` chooses the colour."""

    name: str
    link: str
    start: datetime
    end: datetime | None
    status: str


def waterfall(visits: Sequence[TimeBar], slowest: Sequence[TimeBar], start: datetime, end: datetime) -> Markup:
    """Returns a bar for each visit of a step, and below them for each of the slowest iterations.

    Args:
        start: where the time axis begins, and ``end`` where it ends; bars without an end reach to it.
    """
    shown = visits[-MOST_VISITS:]
    if len(shown) < len(visits):
        start = min(one.start for one in shown)
        slowest = [one for one in slowest if one.start >= start]
    scale = (WIDTH - LABEL - 70) / (whole := max((end - start).total_seconds(), 0.001))
    height = (len(shown) + len(slowest)) * ROW + (ROW if slowest else 0)

    def bars(drawn: Sequence[TimeBar], top: int) -> Markup:
        return Markup("").join(
            Markup(
                '<a href="{link}"><text class="label" x="{label}" y="{baseline}" text-anchor="end">{name}</text>'
                '<rect class="bar-{status}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="12" rx="2"/>'
                '<text x="{after:.1f}" y="{baseline}">{seconds}</text></a>'
            ).format(
                link=one.link,
                label=LABEL - 8,
                baseline=top + number * ROW + 10,
                name=one.name,
                status=one.status,
                x=(x := LABEL + max((one.start - start).total_seconds(), 0) * scale),
                y=top + number * ROW,
                width=(width := max((seconds := ((one.end or end) - one.start).total_seconds()) * scale, 2)),
                after=x + width + 5,
                seconds=brief(seconds),
            )
            for number, one in enumerate(drawn)
        )

    rows, below = bars(shown, 24), len(shown) * ROW + 24
    if slowest:
        heading = Markup('<text class="label heading" x="10" y="{y}">Slowest iterations</text>').format(y=below + 12)
        rows += heading + bars(slowest, below + ROW)
    ticks = Markup("").join(
        Markup(
            '<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{bottom}"/>'
            '<text x="{x:.1f}" y="11" text-anchor="middle">{text}</text>'
        ).format(x=LABEL + part * whole / 4 * scale, bottom=height + 22, text=brief(part * whole / 4))
        for part in range(5)
    )
    return Markup(
        '<svg class="chart waterfall" viewBox="0 0 {width} {height}" role="group" aria-label="Time of each step">'
        "{ticks}{rows}</svg>"
    ).format(width=WIDTH, height=height + 30, ticks=ticks, rows=rows)


def histogram(bins: Sequence[tuple[float, float, int]], label: str) -> Markup:
    """Returns a bar for each range of durations, given by its bounds in seconds and the number of iterations."""
    most = max((number for _, _, number in bins), default=0)
    if not most:
        return Markup("")
    step = min((WIDTH - 2 * EDGE) / len(bins), 90)
    bars = Markup("").join(
        Markup(
            '<g><title>{low} to {high}: {number}</title><rect class="bar-plain" x="{x:.1f}" y="{y:.1f}" '
            'width="{width:.1f}" height="{height:.1f}" rx="2"/>'
            '<text x="{middle:.1f}" y="{above:.1f}" text-anchor="middle">{number}</text>'
            '<text x="{x:.1f}" y="152" text-anchor="middle">{low}</text></g>'
        ).format(
            low=brief(low),
            high=brief(high),
            number=f"{number:,}",
            x=(x := EDGE + place * step),
            y=130 - (height := 110 * number / most),
            width=step - 3,
            height=height,
            middle=x + (step - 3) / 2,
            above=126 - height,
        )
        for place, (low, high, number) in enumerate(bins)
    )
    return Markup(
        '<svg class="chart histogram" viewBox="0 0 {width} 160" role="img" aria-label="{label}">{bars}</svg>'
    ).format(width=max(round(step * len(bins) + 2 * EDGE), WIDTH // 2), label=label, bars=bars)
