"""Places the boxes of a graph in layers from top to bottom (Sugiyama, Tagawa and Toda 1981)."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

Point = tuple[float, float]
Pair = tuple[int, int]

MOST_POINTS = 5_000
"""Boxes and bends of a drawing; a larger one is unreadable."""

GAP, LAYER_GAP, BEND = 30, 54, 18
"""Between boxes of a layer, between layers, and between the bends of edges."""

MARGIN, LANE = 26, 9
"""Around the drawing, and between edges that lead back."""

SWEEPS = 12


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """A drawing.

    Attributes:
        boxes: the middle of each box's upper side.
        lines: the points of each edge, from its source to its target. Those of an edge that leads back are corners.
    """

    width: float
    height: float
    boxes: tuple[Point, ...]
    lines: dict[Pair, tuple[Point, ...]]


@dataclass(slots=True)
class _Layers:
    """Points in layers: the boxes, and after them the bends of edges that pass a layer."""

    count: int
    layers: list[list[int]]
    above: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    below: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    chains: dict[Pair, list[int]] = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)
    x: dict[int, float] = field(default_factory=dict)

    def number(self, layer: Iterable[int]) -> None:
        """Notes the places of points in their layer."""
        self.place.update((point, place) for place, point in enumerate(layer))


@lru_cache(maxsize=64)
def layered(count: int, edges: tuple[Pair, ...], width: int, height: int) -> GraphLayout | None:
    """Returns a drawing of so many boxes; None if it would have more than :data:`MOST_POINTS` points.

    Args:
        edges: different pairs of boxes. One whose target is not after its source leads back.
        width: of each box; ``height`` too.
    """
    forward = [(source, target) for source, target in edges if source < target]
    rank = _ranks(count, forward)
    if count + sum(rank[target] - rank[source] - 1 for source, target in forward) > MOST_POINTS:
        return None
    layers = _in_layers(count, forward, rank)
    _reduce_crossings(layers)
    _place(layers, width)
    tops = [MARGIN + number * (height + LAYER_GAP) for number in range(len(layers.layers))]
    lines = _lines(layers, rank, tops, width, height)
    back = [(source, target) for source, target in edges if source >= target]
    lines |= _lines_back(back, layers, rank, tops, width, height)
    right = max(
        [x for points in lines.values() for x, _ in points] + [layers.x[box] + width / 2 for box in range(count)]
    )
    boxes = tuple((layers.x[box], tops[rank[box]]) for box in range(count))
    return GraphLayout(right + MARGIN, tops[-1] + height + MARGIN, boxes, lines)


def _ranks(count: int, forward: Sequence[Pair]) -> list[int]:
    """Returns the layer of each box: the longest path to it."""
    rank = [0] * count
    for source, target in sorted(forward):
        rank[target] = max(rank[target], rank[source] + 1)
    return rank


def _in_layers(count: int, forward: Sequence[Pair], rank: Sequence[int]) -> _Layers:
    drawing = _Layers(count, [[] for _ in range(max(rank) + 1)])
    for box, layer in enumerate(rank):
        drawing.layers[layer].append(box)
    free = count
    for source, target in forward:
        bends = range(free, free := free + rank[target] - rank[source] - 1)
        for layer, point in enumerate(bends, start=rank[source] + 1):
            drawing.layers[layer].append(point)
        chain = drawing.chains[source, target] = [source, *bends, target]
        for upper, lower in pairwise(chain):
            drawing.below[upper].append(lower)
            drawing.above[lower].append(upper)
    for one in drawing.layers:
        drawing.number(one)
    return drawing


def _reduce_crossings(drawing: _Layers) -> None:
    """Orders each layer by the mean place of the neighbours, down and up in turn, and keeps the best order."""
    best, fewest = [[*layer] for layer in drawing.layers], _crossings(drawing)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        neighbours, layers = (
            (drawing.below, drawing.layers[-2::-1]) if sweep % 2 else (drawing.above, drawing.layers[1:])
        )
        for layer in layers:
            means = {
                point: sum(drawing.place[one] for one in near) / len(near) if (near := neighbours[point]) else place
                for place, point in enumerate(layer)
            }
            layer.sort(key=means.__getitem__)
            drawing.number(layer)
        if (crossings := _crossings(drawing)) < fewest:
            best, fewest = [[*layer] for layer in drawing.layers], crossings
    drawing.layers = best
    for layer in best:
        drawing.number(layer)


def _crossings(drawing: _Layers) -> int:
    total = 0
    for layer in drawing.layers:
        passed: list[int] = []
        for point in layer:
            targets = sorted(drawing.place[one] for one in drawing.below[point])
            total += sum(len(passed) - bisect_right(passed, target) for target in targets)
            for target in targets:
                insort(passed, target)
    return total


def _place(drawing: _Layers, width: int) -> None:
    """Draws the points of each layer towards their neighbours, as far as those beside them let them."""
    half = {point: (width + GAP if point < drawing.count else BEND) / 2 for layer in drawing.layers for point in layer}
    for layer in drawing.layers:
        _spread(drawing, layer, half, dict.fromkeys(layer, 0.0))
    last = len(drawing.layers) - 1
    down, up = [*range(last + 1)], [*range(last, -1, -1)]
    passes = [(down, (drawing.above,)), (up, (drawing.below,))] * 4
    for order, sides in [*passes, *[(down, (drawing.above, drawing.below))] * 2]:
        for number in order:
            layer = drawing.layers[number]
            _spread(drawing, layer, half, {point: _wanted(drawing, point, sides) for point in layer})
    least = min(drawing.x[point] - half[point] for point in half)
    for point in half:
        drawing.x[point] += MARGIN - GAP / 2 - least


def _wanted(drawing: _Layers, point: int, sides: Sequence[dict[int, list[int]]]) -> float:
    """Returns where a point would be if it were alone; long edges are straight rather than short ones."""
    total = weights = 0.0
    for one in (one for side in sides for one in side[point]):
        weight = (1, 2, 8)[(one >= drawing.count) + (point >= drawing.count)]
        total, weights = total + weight * drawing.x[one], weights + weight
    return total / weights if weights else drawing.x[point]


def _spread(drawing: _Layers, layer: Sequence[int], half: dict[int, float], wanted: dict[int, float]) -> None:
    """Moves the points of a layer to the mean of the two closest places: pushed to the right, and to the left."""
    right, left, edge = {}, {}, float("-inf")
    for point in layer:
        right[point] = max(wanted[point], edge + half[point])
        edge = right[point] + half[point]
    edge = float("inf")
    for point in reversed(layer):
        left[point] = min(wanted[point], edge - half[point])
        edge = left[point] - half[point]
    drawing.x.update((point, (right[point] + left[point]) / 2) for point in layer)


def _lines(
    drawing: _Layers, rank: Sequence[int], tops: Sequence[float], width: int, height: int
) -> dict[Pair, tuple[Point, ...]]:
    starts = _ports(drawing, {pair: (pair[0], chain[1]) for pair, chain in drawing.chains.items()}, width)
    ends = _ports(drawing, {pair: (pair[1], chain[-2]) for pair, chain in drawing.chains.items()}, width)
    lines = {}
    for pair, chain in drawing.chains.items():
        source, target = pair
        points = [(starts[pair], tops[rank[source]] + height)]
        for layer, bend in enumerate(chain[1:-1], start=rank[source] + 1):
            points += [(drawing.x[bend], tops[layer]), (drawing.x[bend], tops[layer] + height)]
        lines[pair] = (*points, (ends[pair], tops[rank[target]]))
    return lines


def _ports(drawing: _Layers, ends: dict[Pair, Pair], width: int) -> dict[Pair, float]:
    """Returns where edges touch their boxes: beside each other, in the order of the points that they lead to."""
    by_box = defaultdict(list)
    for pair, (box, _) in ends.items():
        by_box[box].append(pair)
    ports = {}
    for box, pairs in by_box.items():
        pairs.sort(key=lambda pair: drawing.x[ends[pair][1]])
        step = min(14.0, (width / 2) / len(pairs))
        for number, pair in enumerate(pairs):
            ports[pair] = drawing.x[box] + (number - (len(pairs) - 1) / 2) * step
    return ports


def _lines_back(
    back: Sequence[Pair], drawing: _Layers, rank: Sequence[int], tops: Sequence[float], width: int, height: int
) -> dict[Pair, tuple[Point, ...]]:
    """Returns the corners of edges that lead back: past the right side of all layers between."""
    rights = [
        max(drawing.x[one] + (width / 2 if one < drawing.count else 0) for one in layer) for layer in drawing.layers
    ]
    lines: dict[Pair, tuple[Point, ...]] = {}
    lane = 0
    for source, target in sorted(back, key=lambda pair: abs(rank[pair[0]] - rank[pair[1]])):
        leaves, arrives = drawing.x[source] + width * 0.35, drawing.x[target] + width * 0.35
        side = drawing.x[source] + width / 2 + GAP / 3
        if source != target:
            first, last = sorted((rank[source], rank[target]))
            side = max(rights[first : last + 1]) + 2 * LANE + lane * LANE
            lane += 1
        low = tops[rank[source]] + height + LANE + lane % 3 * 4
        high = tops[rank[target]] - LANE - lane % 3 * 4
        bottom, top = tops[rank[source]] + height, tops[rank[target]]
        lines[source, target] = (
            (leaves, bottom),
            (leaves, low),
            (side, low),
            (side, high),
            (arrives, high),
            (arrives, top),
        )
    return lines
