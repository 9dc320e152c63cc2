"""The drawing of a playbook's steps: complete, without overlaps, harmless whatever the names, and quick."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import (
    CALL_PARTIAL,
    Arc,
    FanoutEngine,
    FanoutSpec,
    Loop,
    LoopMode,
    Metadata,
    Playbook,
    Routing,
    Step,
    Task,
)
from noetl_dagster.service.pages.graph import MOST_STEPS, StepState, graph_svg
from noetl_dagster.service.pages.graph.layout import MARGIN, layered
from noetl_dagster.service.pages.rendering import cells, compact, shortened
from tests.service.pages.hostile import HOSTILE

PROJECT = Path(__file__).parents[3]
EXAMPLES = [*PROJECT.glob("examples/*/*.yaml"), *PROJECT.glob("playbooks/*.yaml")]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(markup: Markup) -> ElementTree.Element:
    """Returns the drawing as XML, which has no element or attribute that runs anything or has a style."""
    root = ElementTree.fromstring(markup)
    for one in root.iter():
        assert one.tag.removeprefix(SVG) in {
            *("div", "svg", "defs", "marker", "path", "g", "a", "title", "rect", "text", "ol", "li", "span"),
        }
        assert not [name for name in one.attrib if name == "style" or name.startswith("on")]
    return root


def having(root: ElementTree.Element, css_class: str) -> list[ElementTree.Element]:
    """Returns the elements with a class, in the order of the document."""
    return [one for one in root.iter() if css_class in one.get("class", "").split()]


def titles(root: ElementTree.Element, css_class: str) -> list[str]:
    return ["".join(one.find(f"{SVG}title").itertext()) for one in having(root, css_class)]  # type: ignore[union-attr]


def playbook(arcs: dict[str, list[str]], **changes: dict[str, object]) -> Playbook:
    """A playbook from the targets of its steps; ``changes`` are further fields by step."""
    steps = tuple(
        Step(
            name=name,
            tasks=(Task(name="task", kind="python"),),
            routing=Routing(arcs=tuple(Arc(step=target) for target in targets)),
        ).model_copy(update=changes.get(name, {}))
        for name, targets in arcs.items()
    )
    return Playbook(metadata=Metadata(name="g", path="g"), steps=steps)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_step_and_arc_of_the_examples_is_drawn(file: Path) -> None:
    if "kind: Playbook" not in file.read_text():
        pytest.skip("not a playbook")
    found = load_playbook(file)
    root = drawn(graph_svg(found))
    assert len(having(root, "node")) == len(found.steps)
    assert len(having(root, "edge")) == sum(len(step.targets) for step in found.steps)


def test_states_classes_and_words() -> None:
    shape = playbook({"a": ["b"], "b": ["c"], "c": []}, b={"loop": Loop(mode=LoopMode.PARALLEL)})
    states = {
        "a": StepState("COMPLETED", visits=3),
        "b": StepState("RUNNING", visits=1, done=250, total=1_000, failed=10),
        "c": StepState("<b>", visits=1),
    }
    root = drawn(graph_svg(shape, states=states))
    assert titles(root, "node") == [
        "a, python, completed ×3",
        "b, python, loop, parallel, running, 250 / 1,000, 10 failed",
        "c, python",
    ]
    assert [having(root, name)[0].get("class") for name in ("status-COMPLETED", "status-RUNNING", "status-none")] == [
        "node status-COMPLETED",
        "node status-RUNNING loop",
        "node status-none",
    ]
    whole, done, failed = (
        float(having(root, name)[0].get("width", "")) for name in ("track", "track-done", "track-failed")
    )
    assert done == pytest.approx(whole / 4, abs=0.1)
    assert failed == pytest.approx(whole / 100, abs=0.1)


def test_more_ends_than_items_stay_in_the_box() -> None:
    shape = playbook({"a": []}, a={"loop": Loop()})
    root = drawn(graph_svg(shape, states={"a": StepState("RUNNING", total=5, done=9, failed=9)}))
    assert having(root, "track")[0].get("width") == having(root, "track-done")[0].get("width")
    assert not having(root, "track-failed")


def test_joins_cycles_streams_and_fanouts_are_recognised() -> None:
    arcs = (Arc(step="out", on=CALL_PARTIAL, when="{{ a < b }}"), Arc(step="start", on="step.failed"))
    shape = playbook(
        {"start": ["left", "right"], "left": ["join"], "right": ["join", "right"], "join": [], "out": []},
        join={"routing": Routing(arcs=arcs)},
        left={"loop": Loop(mode=LoopMode.FANOUT, fanout=FanoutSpec(engine=FanoutEngine.WORKERS))},
    )
    root = drawn(graph_svg(shape))
    assert titles(root, "stream") == ["join → out\non call.partial, when {{ a < b }}"]
    assert sorted(titles(root, "back")) == ["join → start\non step.failed", "right → right"]
    assert titles(root, "fanout") == ["left, python, fan-out, workers"]
    assert len(having(root, "stack")) == 2
    assert len(having(root, "join")) == 1
    assert "join, python, joins 2 steps" in titles(root, "node")


def test_arcs_of_one_pair_are_one_line_with_all_conditions() -> None:
    arcs = (Arc(step="b", when="{{ x }}"), Arc(step="b", on="step.failed"), Arc(step="unknown"))
    root = drawn(graph_svg(playbook({"a": [], "b": []}, a={"routing": Routing(arcs=arcs)})))
    assert titles(root, "edge") == ["a → b\nwhen {{ x }}\non step.failed"]


def test_boxes_are_links_where_there_is_an_address() -> None:
    shape = playbook({"a": ["b"], "b": []})
    root = drawn(graph_svg(shape, link=lambda step: f'/steps/{step}?a="b"&c'))
    assert [one.get("href") for one in root.iter(f"{SVG}a")] == ['/steps/a?a="b"&c', '/steps/b?a="b"&c']
    assert root.find(f"{SVG}svg").get("role") == "group"  # type: ignore[union-attr]
    assert drawn(graph_svg(shape)).find(f"{SVG}svg").get("role") == "img"  # type: ignore[union-attr]


@pytest.mark.parametrize("link", [None, lambda step: f"/steps/{quote(step)}"], ids=["plain", "links"])
@pytest.mark.parametrize("count", [1, MOST_STEPS], ids=["drawn", "listed"])
def test_hostile_names_are_only_text(count: int, link: object) -> None:
    names = [f"{text}{number}" for number, text in enumerate(HOSTILE)]
    arcs = dict.fromkeys(names, names[:2]) | {f"s{number}": [] for number in range(count)}
    shape = playbook(arcs)  # type: ignore[arg-type]
    conditions = Routing(arcs=tuple(Arc(step=names[1], when=text) for text in HOSTILE))
    kinds = tuple(Task(name="task", kind=text) for text in HOSTILE[:3])
    first = shape.steps[0].model_copy(update={"routing": conditions, "tasks": kinds, "loop": Loop()})
    states = dict.fromkeys(names, StepState(HOSTILE[1], visits=2))
    markup = graph_svg(shape.model_copy(update={"steps": (first, *shape.steps[1:])}), states=states, link=link)  # type: ignore[arg-type]
    root = drawn(markup)
    assert HOSTILE[0] in "".join(root.itertext())
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", markup)
    if count == 1:
        assert max(cells("".join(one.itertext())) for one in root.iter(f"{SVG}text")) <= 24


GRAPHS = st.integers(1, 12).flatmap(
    lambda size: st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=30, unique=True).map(
        lambda edges: (size, tuple(edges))
    )
)


@given(GRAPHS)
def test_boxes_never_overlap_and_lines_lead_from_box_to_box(graph: tuple[int, tuple[tuple[int, int], ...]]) -> None:
    count, edges = graph
    width, height = 100, 40
    layout = layered(count, edges, width, height)
    assert layout is not None
    assert set(layout.lines) == set(edges)
    for (source, target), points in layout.lines.items():
        for box, (x, y), side in ((source, points[0], height), (target, points[-1], 0)):
            assert abs(x - layout.boxes[box][0]) < width / 2
            assert y == layout.boxes[box][1] + side
        if source < target:
            assert all(upper[1] < lower[1] for upper, lower in pairwise(points))
    by_layer = sorted((top, x) for x, top in layout.boxes)
    assert all(first[0] < second[0] or second[1] - first[1] >= width for first, second in pairwise(by_layer)), (
        layout.boxes
    )
    everything = [*layout.boxes, *(point for points in layout.lines.values() for point in points)]
    assert all(0 < x < layout.width and 0 < y < layout.height for x, y in everything)
    assert min(x for x, _ in layout.boxes) - width / 2 >= 0
    assert layout.width - max(x for x, _ in layout.boxes) - width / 2 >= MARGIN - 0.01


def test_a_tree_has_no_crossings() -> None:
    layout = layered(7, ((0, 1), (0, 2), (1, 6), (1, 5), (2, 4), (2, 3)), 100, 40)
    assert layout is not None
    x = [place for place, _ in layout.boxes]
    assert (max(x[5], x[6]) < min(x[3], x[4])) is (x[1] < x[2])


@pytest.mark.parametrize(("count", "reach"), [(MOST_STEPS, 2), (MOST_STEPS, 200), (2_000, 5)])
def test_large_playbooks_take_no_second(count: int, reach: int) -> None:
    arcs = {f"s{one}": [f"s{min(one + step, count)}" for step in range(1, reach, 7)] for one in range(count)}
    shape = playbook(arcs)
    before = time.process_time()
    markup = graph_svg(shape)
    assert time.process_time() - before < 1
    assert ("<ol" in markup) is (count > MOST_STEPS or reach > 100)


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("漢字漢", 4, "漢…"),
        ("a\u202eb", 10, "a⟨U+202E⟩b"),
        ("\u202eabcd", 4, "⟨U+…"),
    ],
)
def test_texts_are_shortened(text: str, most: int, shown: str) -> None:
    assert shortened(text, most) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (99_999, "99,999"), (100_000, "100k"), (999_999, "999k"), (1_250_000, "1.2M"), (3 * 10**9, "3G")],
)
def test_counts_are_compact(number: int, shown: str) -> None:
    assert compact(number) == shown
