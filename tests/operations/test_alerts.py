"""Alerts and dashboards: queries that Prometheus parses, of metrics and labels that there are, each with what to do.

When alerts fire ``promtool`` tells, of Debian's package ``prometheus``; ``alerts_test.yaml`` says when they should.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from noetl_dagster.cli.health import Health
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings
from tests.helm.chart import MINIMAL, NAMESPACE, manifests, of_kind, overlaid
from tests.service.test_dashboards import DASHBOARDS, TARGET, counted, series_of
from tests.service.test_dashboards import scraped as scraped

PROJECT = Path(__file__).parents[2]
RUNBOOK = PROJECT / "docs/reference/runbook.md"
CASES = Path(__file__).with_name("alerts_test.yaml")


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of rules of a release."""
    monitored = overlaid(MINIMAL, {"monitoring": {"rules": {"enabled": True}}}, values)
    (rules,) = of_kind(manifests(monitored), "PrometheusRule").values()
    groups: list[dict[str, Any]] = rules["spec"]["groups"]
    return groups


GROUPS = rendered({})
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}

OF_OTHERS = {
    "kube_deployment_status_replicas_available": {"namespace", "deployment"},
    "kube_deployment_spec_replicas": {"namespace", "deployment"},
    "kube_pod_container_status_restarts_total": {"namespace", "pod", "container", "uid"},
}
"""What kube-state-metrics gives, by its documentation."""

EQUAL, MATCHES = promql.MatchOp.Equal, promql.MatchOp.Re

Series = dict[str, set[str]]


def queries() -> Iterator[tuple[str, str]]:
    """Every query with where it stands."""
    for name, rule in ALERTS.items():
        yield name, rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")


def problems(query: str, known: Series) -> list[str]:
    """What of a query there is not: metrics, and labels that it selects, groups or joins by."""
    found: list[str] = []

    def look(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            if node.name not in known:
                found.append(f"no metric {node.name}")
            labels = {matcher.name for matcher in node.matchers.matchers}
            found.extend(f"no label {label} of {node.name}" for label in labels - known.get(node.name, labels))
        below = set().union(*(known.get(name, set()) for name in _metrics(node)))
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.extend(f"no label {label} to group by" for label in set(node.modifier.labels) - below)
        matching = node.modifier.matching if isinstance(node, promql.BinaryExpr) and node.modifier else None
        if matching is not None:
            found.extend(f"no label {label} to join by" for label in set(matching.labels) - below)
        return True

    promql.walk(promql.parse(query), look)
    return found


def _metrics(node: Any) -> set[str]:
    names: set[str] = set()

    def look(one: Any) -> bool:
        if isinstance(one, promql.VectorSelector):
            names.add(one.name)
        return True

    promql.walk(node, look)
    return names


async def test_queries_ask_for_what_there_is(scraped: Series) -> None:
    """After a run in the pool; what only mishaps count is taken from a registry in which all was counted once."""
    health = Health(Settings())  # of processes without an API
    processes = series_of(Metrics().text(health).decode())
    known = {
        name: labels | counted().get(name, set()) | TARGET for name, labels in (processes | scraped | OF_OTHERS).items()
    }

    for name in ("noetl_queue_seconds_bucket", "noetl_run_seconds_bucket"):
        assert scraped[name] == {"le", "step", "tool_kind"}, "the run is counted"
    wrong = {where: found for where, query in queries() if (found := problems(query, known))}

    assert wrong == {}


def selectors(query: str) -> Iterator[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def look(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        return True

    promql.walk(promql.parse(query), look)
    yield from found


def test_queries_know_their_namespace() -> None:
    """Alerts that of the release, dashboards the one that is chosen: two releases are not mixed up."""
    for where, query in queries():
        wanted = (EQUAL, NAMESPACE) if where in ALERTS else (MATCHES, "$namespace")
        for selector in selectors(query):
            named = [one for one in selector.matchers.matchers if one.name == "namespace"]
            assert [(one.op, one.value) for one in named] == [wanted], f"{where}: {selector.name}"


def test_alerts_say_their_namespace_and_release() -> None:
    renamed = rendered({"fullnameOverride": "own"})
    rules = [rule for group in renamed for rule in group["rules"]]

    assert {rule["labels"]["namespace"] for rule in rules} == {NAMESPACE}
    assert sum('=~"own-.+"' in rule["expr"] for rule in rules) == 2
    assert not re.search(r"\$(namespace|release)|trial", json.dumps(renamed))


def test_without_an_api_nobody_misses_it() -> None:
    elsewhere = rendered({"api": {"enabled": False}, "workers": {"serverUrl": "https://api.example.com"}})
    left = {rule["alert"] for group in elsewhere for rule in group["rules"]}

    assert ALERTS.keys() - left == {"NoetlApiAway", "NoetlApiErrors", "NoetlApiRefuses"}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH; it is in Debian's package prometheus (see CONTRIBUTING.md)")
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": GROUPS}))
    cases = shutil.copy(CASES, tmp_path)

    told = subprocess.run([promtool, "test", "rules", cases], capture_output=True, text=True, check=False)

    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_seen_firing_and_silent(name: str) -> None:
    (case,) = (one for one in yaml.safe_load(CASES.read_text())["tests"] if one["name"] == name)
    fires = [
        any(f'alertname="{name}"' in sample["labels"] for sample in asked.get("exp_samples", ()))
        for asked in case["promql_expr_test"]
    ]

    assert fires[0] is False
    assert any(fires)
    assert fires[-1] is False


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("max(noetl_queue_depths) > 0", "no metric noetl_queue_depths"),
        ("sum by (worker) (noetl_worker_slots)", "no label worker to group by"),
        (
            'sum(rate(noetl_http_requests_total{code="500"}[5m]))',
            "no label code of noetl_http_requests_total",
        ),
        ("noetl_workers and on (nothing) noetl_queue_depth", "no label nothing to join by"),
    ],
)
async def test_what_there_is_not_is_found(query: str, problem: str) -> None:
    known = counted() | {"noetl_http_requests_total": {"method", "route", "status"}}

    assert problem in problems(query, known)


def test_what_is_no_query_does_not_parse() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        problems("max(noetl_queue_depth > 0", counted())


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]

    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
    assert page.endswith(f"/{RUNBOOK.relative_to(PROJECT)}")
    sections = _sections(RUNBOOK.read_text())
    assert anchor in sections, f"{RUNBOOK.name} has no heading {name}"
    assert len(sections[anchor].split()) > 15, f"what to do when {name}?"
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]):
        assert re.search(rf"\b{label}\b", rule["expr"]), f"{label} is not among the labels that are left"


def test_the_runbook_speaks_of_alerts_that_there_are() -> None:
    spoken = {heading for heading in _sections(RUNBOOK.read_text()) if re.fullmatch(r"noetl[a-z]+", heading)}

    assert spoken == {name.lower() for name in ALERTS}


def _sections(text: str) -> dict[str, str]:
    """What stands below each heading, by the anchor that GitHub makes of it."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)[1:]
    anchors = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in parts[::2])
    return dict(zip(anchors, parts[1::2], strict=True))
