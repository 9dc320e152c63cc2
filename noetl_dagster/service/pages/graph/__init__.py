"""The steps of a playbook as SVG, with their states in an execution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from noetl_dagster.playbook.graph import StepGraph
from noetl_dagster.playbook.models import Arc, Playbook, Step
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.service.pages.graph.layout import GraphLayout, Pair, Point, layered
from noetl_dagster.service.pages.rendering import cells, compact, counted, shortened

MOST_STEPS = 300
"""Steps that are drawn; more are listed."""

MOST_ARCS = 1_500

STATUSES = frozenset({"RUNNING", "COMPLETED", "FAILED", "OPEN", "SKIPPED", "CANCELLED"})

NAME_CELLS, LEAST_CELLS, PIXELS = 24, 20, 7.4
CONDITION_CELLS = 300
KINDS_SHOWN = 2

Link = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of a step in an execution.

    Attributes:
        status: one of :data:`STATUSES`; empty for a step that was not entered.
        visits: how often it was entered.
        total: number of a loop's items; 0 while it is not known.
        done: iterations that completed; ``failed``: those that failed for good.
    """

    status: str = ""
    visits: int = 0
    done: int = 0
    total: int = 0
    failed: int = 0

    @property
    def is_loop(self) -> bool:
        """Reports whether there are counts of iterations."""
        return bool(self.total or self.done or self.failed)

    @property
    def css_class(self) -> str:
        """The class of its status."""
        return f"status-{self.status if self.status in STATUSES else 'none'}"

    @property
    def words(self) -> str:
        """Formats status and visits: ``running``, ``completed ×3``."""
        status = self.status.lower() if self.status in STATUSES else ""
        return f"{status} ×{self.visits:,}" if self.visits > 1 else status

    @property
    def counts(self) -> str:
        """Formats the counts: ``10 / 20, 1 failed``."""
        if not self.is_loop:
            return ""
        total = f"{compact(self.done)} / {compact(self.total)}" if self.total else f"{compact(self.done)} done"
        return f"{total}, {compact(self.failed)} failed" if self.failed else total


_NO_STATE = StepState()


def graph_svg(playbook: Playbook, *, states: Mapping[str, StepState] | None = None, link: Link | None = None) -> Markup:
    """Returns the steps and arcs of a playbook as SVG in a container that scrolls; a list if they are too many.

    Args:
        states: by step; a step without one was not entered.
        link: returns the address to which the box of a step leads.
    """
    states = states or {}
    drawing = _Drawing.of(playbook) if 0 < len(playbook.steps) <= MOST_STEPS else None
    if drawing is None:
        return _listed(playbook, states, link)
    layout = drawing.layout
    edges = Markup("").join(_edge(drawing, pair, points) for pair, points in layout.lines.items())
    nodes = Markup("").join(
        _node(drawing, number, states.get(step.name, _NO_STATE), link) for number, step in enumerate(drawing.steps)
    )
    return Markup(
        '<div class="graph-scroll" tabindex="0">'
        '<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'viewBox="0 0 {width} {height}" role="{role}" aria-label="{label}">'
        '<defs><marker id="graph-arrow" class="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" '
        'markerWidth="10" markerHeight="10" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        "{edges}{nodes}</svg></div>"
    ).format(
        width=round(layout.width),
        height=round(layout.height),
        role="group" if link else "img",  # the parts of an image are hidden from assistive technology, links too
        label=f"Steps of {shortened(playbook.name, 80)}: {counted(len(drawing.steps), 'step')}",
        edges=edges,
        nodes=nodes,
    )


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What is drawn of a playbook, whatever the states of its steps.

    Attributes:
        steps: in topological order, cycles forward from their entries.
        arcs: by the places of source and target among the steps.
        joins: by place, from how many steps arcs lead forward to a step.
    """

    steps: tuple[Step, ...]
    arcs: dict[Pair, list[Arc]]
    joins: dict[int, int]
    width: int
    height: int
    layout: GraphLayout

    @classmethod
    def of(cls, playbook: Playbook) -> _Drawing | None:
        """Returns the drawing; None if there is too much to draw."""
        steps = _in_order(playbook)
        place = {step.name: number for number, step in enumerate(steps)}
        arcs: dict[Pair, list[Arc]] = defaultdict(list)
        for step in steps:
            for arc in step.routing.arcs:
                if arc.step in place:
                    arcs[place[step.name], place[arc.step]].append(arc)
        if len(arcs) > MOST_ARCS:
            return None
        widest = max(min(max(cells(step.name[:NAME_CELLS]) for step in steps), NAME_CELLS), LEAST_CELLS)
        width, height = round(widest * PIXELS) + 28, 64 if any(step.loop for step in steps) else 48
        layout = layered(len(steps), tuple(arcs), width, height)
        if layout is None:
            return None
        joins: dict[int, int] = defaultdict(int)
        for source, target in arcs:
            joins[target] += source < target
        return cls(steps, arcs, joins, width, height, layout)


def _in_order(playbook: Playbook) -> tuple[Step, ...]:
    graph = StepGraph(playbook)
    names = (name for region in graph.regions for name in dict.fromkeys((*region.order, *region.steps)))
    return tuple(playbook.step(name) for name in names)


def _edge(drawing: _Drawing, pair: Pair, points: Sequence[Point]) -> Markup:
    source, target = pair
    arcs = drawing.arcs[pair]
    leads_back = source >= target
    classes = ["edge", *(["back"] if leads_back else []), *(["stream"] if any(one.is_stream for one in arcs) else [])]
    names = (shortened(drawing.steps[place].name, 80) for place in pair)
    title = "\n".join([" \u2192 ".join(names), *filter(None, map(_condition, arcs))])
    return Markup(
        '<g class="{classes}"><title>{title}</title><path class="hit" d="{path}"/>'
        '<path class="line" d="{path}" marker-end="url(#graph-arrow)"/></g>'
    ).format(classes=" ".join(classes), title=title, path=_corners(points) if leads_back else _curve(points))


def _condition(arc: Arc) -> str:
    """Formats when an arc fires; an empty text if it always does."""
    parts = [f"on {arc.on}"] if arc.on else []
    if arc.when is not None:
        parts.append(f"when {arc.when}")
    return shortened(SECRETS.redact(", ".join(parts)), CONDITION_CELLS)


def _curve(points: Sequence[Point]) -> str:
    """Returns the path of an edge: curves between layers, and lines past their boxes."""
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for place in range(1, len(points)):
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        if place % 2:
            middle = (y0 + y1) / 2
            path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
        else:
            path.append(f"V{y1:.1f}")
    return "".join(path)


def _corners(points: Sequence[Point], radius: float = 6) -> str:
    """Returns a path of lines with round corners."""
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x0, y0), (x2, y2) = _towards(corner, before, radius), _towards(corner, after, radius)
        path.append(f"L{x0:.1f} {y0:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {x2:.1f} {y2:.1f}")
    path.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(path)


def _towards(corner: Point, other: Point, radius: float) -> Point:
    """Returns the point so far from a corner on the way to another point, at most half of the way."""
    (x0, y0), (x1, y1) = corner, other
    length = abs(x1 - x0) + abs(y1 - y0)
    share = min(radius / length, 0.5) if length else 0.0
    return x0 + (x1 - x0) * share, y0 + (y1 - y0) * share


def _node(drawing: _Drawing, number: int, state: StepState, link: Link | None) -> Markup:
    step, (middle, top) = drawing.steps[number], drawing.layout.boxes[number]
    width, height = drawing.width, drawing.height
    joined = drawing.joins[number]
    left = round(middle - width / 2, 1)
    classes = f"node {state.css_class}" + (" fanout" if step.is_fanout else " loop" if step.loop else "")
    title = describe(step, state) + (f", joins {counted(joined, 'step')}" if joined > 1 else "")
    box = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="8"/>')
    parts = [
        *(
            box.format("stack", left + shift, top - shift, width, height)
            for shift in ((6, 3) if step.is_fanout else ())
        ),
        box.format("box", left, top, width, height),
        Markup('<path class="join" d="M{} {}h{}"/>').format(left + 8, top - 3, width - 16) if joined > 1 else "",
        _text("name", left + 12, top + 20, shortened(step.name, NAME_CELLS)),
        _text("kind", left + 12, top + 38, kinds_of(step)),
        _text("state", left + width - 10, top + 38, state.words),
    ]
    if step.loop is not None:
        parts += [
            _text("counts", left + 12, top + 53, state.counts or loop_of(step)),
            _bar(state, left, top + 57, width),
        ]
    content = Markup("").join(parts)
    if link is None:
        return Markup('<g class="{}"><title>{}</title>{}</g>').format(classes, title, content)
    return Markup('<a class="{}" href="{}" aria-label="{}"><title>{}</title>{}</a>').format(
        classes, link(step.name), title, title, content
    )


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, round(x, 1), y, text) if text else Markup("")


def _bar(state: StepState, left: float, top: float, width: int) -> Markup:
    """Returns the progress of a loop whose number of items is known."""
    if not state.total:
        return Markup("")
    whole = width - 24
    done = round(whole * min(state.done / state.total, 1), 1)
    failed = round(min(whole * state.failed / state.total, whole - done), 1)
    bar = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="3"/>')
    parts = [("track", left + 12, whole), ("track-done", left + 12, done), ("track-failed", left + 12 + done, failed)]
    return Markup("").join(bar.format(name, round(x, 1), top, size) for name, x, size in parts if size > 0)


def kinds_of(step: Step) -> str:
    """Formats the kinds of a step's tasks: ``http, python +1``."""
    kinds = [*dict.fromkeys(task.kind for task in step.tasks)]
    more = f" +{len(kinds) - KINDS_SHOWN}" if len(kinds) > KINDS_SHOWN else ""
    return shortened(", ".join(kinds[:KINDS_SHOWN]), 15) + more


def loop_of(step: Step) -> str:
    """Formats the loop of a step: ``fan-out, workers``, ``loop, parallel``; an empty text without one."""
    if step.loop is None:
        return ""
    return f"fan-out, {step.loop.fanout.engine}" if step.is_fanout else f"loop, {step.loop.mode}"


def describe(step: Step, state: StepState) -> str:
    """Formats a step and its state for people who do not see the drawing."""
    parts = (shortened(step.name, 80), kinds_of(step), loop_of(step), state.words, state.counts)
    return ", ".join(filter(None, parts))


def _listed(playbook: Playbook, states: Mapping[str, StepState], link: Link | None) -> Markup:
    items = []
    for step in playbook.steps:
        state = states.get(step.name, _NO_STATE)
        name: str = escape(shortened(step.name, 80))
        if link is not None:
            name = Markup('<a href="{}">{}</a>').format(link(step.name), name)
        about = ", ".join(filter(None, (kinds_of(step), loop_of(step), state.words, state.counts)))
        items.append(Markup('<li class="{}">{} <span>{}</span></li>').format(state.css_class, name, about))
    return Markup('<ol class="graph-list">{}</ol>').format(Markup("").join(items))
