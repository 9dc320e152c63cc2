"""A chart of horizontal bars on a logarithmic scale, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 760, 170, 90
TOP, BAR, GAP, FOOT = 44, 22, 10, 30


@dataclass(frozen=True)
class Bar:
    title: str
    value: float | None
    label: str
    own: bool


def chart(title: str, bars: list[Bar]) -> str:
    values = [bar.value for bar in bars if bar.value] or [1.0]
    low = math.floor(math.log10(min(values) * 0.9))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    height = TOP + len(bars) * (BAR + GAP) + FOOT
    bottom = height - FOOT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="13" fill="#24292f">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        x = LEFT + (power - low) * scale
        parts += [
            f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{bottom}" stroke="#d0d7de"/>',
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" fill="#57606a">{10**power:,}</text>',
        ]
    for place, bar in enumerate(bars):
        y = TOP + place * (BAR + GAP)
        middle = y + BAR / 2 + 4.5
        length = (math.log10(bar.value) - low) * scale if bar.value else 0
        colour = "#1f6feb" if bar.own else "#8c959f"
        parts += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(bar.title)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{escape(bar.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
