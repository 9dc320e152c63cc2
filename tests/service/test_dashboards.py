"""Panels, legends and variables of the dashboards of docs/; tests/operations/test_alerts.py checks their queries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import EventTransport, Settings
from tests.playbooks import playbook
from tests.pool import working
from tests.service.conftest import serving
from tests.service.test_metrics import QUIET

DASHBOARDS = sorted((Path(__file__).parents[2] / "docs" / "dashboards").glob("*.json"))

TEXT = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: [1, 2, 3, 4, 5], iterator: n, mode: parallel}
    tool: {kind: noop}
"""

TARGET = {"namespace", "pod"}
"""What Prometheus says of whatever it scrapes in a cluster."""

SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def labels_in(expression: str) -> set[str]:
    """Labels that an expression groups by or selects by."""
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    return {name.strip() for group in grouped for name in group.split(",")} | set(selected)


def series_of(text: str) -> dict[str, set[str]]:
    """By the name of a series in a scrape, its labels, as far as it has samples."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES.get(family.type, ()):
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture
async def scraped(settings: Settings) -> dict[str, set[str]]:
    async with serving(settings, event_transport=EventTransport.HTTP) as service:
        engine = await Engine.open(service.settings)
        async with working(service.settings, "w1"):
            state = await engine.run(playbook(TEXT))
            text = (await service.client.get("/metrics")).text
        await engine.close()
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return series_of(text)


def counted() -> dict[str, set[str]]:
    """The labels of everything that is counted, each counted once."""
    metrics = Metrics()
    metrics.claim_sizes.observe(1)
    metrics.count_waited("step", "noop", [0.1])
    metrics.count_ran("step", "noop", [0.1])
    metrics.count_ingested(1, 1, [0.1])
    return series_of(metrics.text(QUIET).decode())


def test_legends_name_labels_that_are_left() -> None:
    assert DASHBOARDS
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert shown <= labels_in(target["expr"]) - {"le"}, f"{path.name}: {panel['title']}"


def test_dashboards_are_of_one_namespace_or_all() -> None:
    for path in DASHBOARDS:
        known = {one["name"]: one for one in json.loads(path.read_text(encoding="utf-8"))["templating"]["list"]}
        chosen = known["namespace"]
        assert chosen["query"]["query"] == "label_values(noetl_queue_depth, namespace)"
        assert chosen["current"]["value"] == ["$__all"]
        assert chosen["allValue"] == ".*"  # also what has no such label


def test_panels_lie_side_by_side_in_rows() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not own & taken, f"{path.name}: {panel['title']} lies upon another panel"
            assert at["x"] + at["w"] <= 24
            taken |= own
