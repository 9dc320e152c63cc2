"""Network policies let through what components need, and nothing else."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helm.chart import KIND, MINIMAL, SCENARIOS, Manifest, manifests, of_kind, overlaid, pods_of, values_file
from tests.helm.launched import run_pods

OUTSIDE = "10.1.2.3"
"""An address outside the cluster."""

METADATA = "169.254.169.254"
"""Where a node's credentials are asked for."""


class Net:
    """What the policies of a release let through, as Kubernetes reads them: a packet needs both sides' leave."""

    def __init__(self, objects: list[Manifest]) -> None:
        self._policies = list(of_kind(objects, "NetworkPolicy").values())
        self._labels: dict[str, Mapping[str, str]] = {pods.component: pods.labels for pods in pods_of(objects)}
        self._labels["run"] = run_pods(objects).labels
        for policy in self._policies:
            labels = policy["spec"]["podSelector"]["matchLabels"]
            self._labels.setdefault(labels.get("app.kubernetes.io/component", "any"), labels)

    @property
    def components(self) -> set[str]:
        return set(self._labels) - {"any"}

    def lets(self, source: str, target: str, port: int) -> bool:
        """Whether a connection gets through; names of components, else an address or ``stranger``."""
        return self._leaves(source, target, port) and self._enters(source, target, port)

    def _leaves(self, source: str, target: str, port: int) -> bool:
        rules = self._rules(source, "Egress", "egress")
        return rules is None or any(self._matches(rule, "to", target, port) for rule in rules)

    def _enters(self, source: str, target: str, port: int) -> bool:
        rules = self._rules(target, "Ingress", "ingress")
        return rules is None or any(self._matches(rule, "from", source, port) for rule in rules)

    def _rules(self, name: str, kind: str, key: str) -> list[Manifest] | None:
        """The rules for a pod; None: no policy has it."""
        labels = self._labels.get(name)
        if labels is None:
            return None
        selecting = [
            policy["spec"]
            for policy in self._policies
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            and kind in policy["spec"]["policyTypes"]
        ]
        return [rule for spec in selecting for rule in spec.get(key, ())] if selecting else None

    def _matches(self, rule: Manifest, peers: str, other: str, port: int) -> bool:
        ports = rule.get("ports")
        if ports is not None and port not in {one["port"] for one in ports}:
            return False
        return peers not in rule or any(self._is(peer, other) for peer in rule[peers])

    def _is(self, peer: Manifest, other: str) -> bool:
        if "ipBlock" in peer:
            try:
                address = ipaddress.ip_address(other)
            except ValueError:
                return False
            block = peer["ipBlock"]
            inside = address in ipaddress.ip_network(block["cidr"])
            return inside and not any(address in ipaddress.ip_network(one) for one in block.get("except", ()))
        if "namespaceSelector" in peer:
            return other not in (OUTSIDE, METADATA)
        wanted: dict[str, Any] = peer["podSelector"].get("matchLabels", {})
        return wanted.items() <= self._labels.get(other, {}).items()


TRIAL = {
    "webserver": {("postgresql", 5432), ("minio", 9000), ("code-location", 4000)},
    "daemon": {("postgresql", 5432), ("minio", 9000), ("code-location", 4000)},
    "code-location": {("postgresql", 5432), ("nats", 4222), ("minio", 9000)},
    "api": {("postgresql", 5432), ("nats", 4222), ("minio", 9000), ("code-location", 4000)},
    "ingest": {("postgresql", 5432), ("nats", 4222), ("minio", 9000)},
    "projection": {("postgresql", 5432)},
    "worker-default": {("postgresql", 5432), ("nats", 4222), ("minio", 9000), ("api", 8700)},
    "run": {("postgresql", 5432), ("nats", 4222), ("minio", 9000), ("api", 8700)},
    "provision": {("postgresql", 5432), ("nats", 4222), ("minio", 9000)},
    "test": {("postgresql", 5432), ("nats", 4222), ("minio", 9000), ("api", 8700)},
    "container": set(),
    "nats": set(),
    "postgresql": set(),
    "minio": set(),
}
"""Who connects to whom."""

PORTS = {port for wanted in TRIAL.values() for _, port in wanted} | {3000, 8701, 9001}


def test_a_trial_s_components_reach_what_they_need_and_nothing_else() -> None:
    net = Net(manifests(KIND))
    assert net.components == set(TRIAL)
    for source in TRIAL:
        reached = {(target, port) for target in TRIAL for port in PORTS if net.lets(source, target, port)}
        extra = {(target, 9001) for target, port in TRIAL[source] if port == 9000}  # the console, on the same server
        beside = {(t, p) for t, p in reached if t == "nats" and p == 8222} if ("nats", 4222) in reached else set()
        # webserver, API and health ports are open to the cluster
        unasked = {(target, port) for target, port in reached if target in ("webserver", "api") or port == 8701}
        assert TRIAL[source] <= reached
        if source in (
            "projection",
            "ingest",
            "daemon",
            "webserver",
            "code-location",
            "provision",
            "postgresql",
        ):
            assert reached <= TRIAL[source] | extra | beside | unasked


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "bare"])
def test_every_address_in_the_settings_is_let_through(scenario: str) -> None:
    """What a process is told to connect to inside the release, it may."""
    objects = manifests(SCENARIOS[scenario])
    net = Net(objects)
    services = {
        name: next(p for p in pods_of(objects) if one["spec"]["selector"].items() <= p.labels.items()).component
        for name, one in of_kind(objects, "Service").items()
    }
    for pods in [*pods_of(objects), run_pods(objects)]:
        named = pods.variables(objects)
        for service, target in services.items():
            users = {
                "api": ("worker", "run", "test"),
                "minio": ("run", "worker", "api", "code", "ingest", "webserver"),
            }
            asked = any(f"//{service}:" in value for value in named.values())
            if asked and pods.component.startswith(users.get(target, ())):
                port = of_kind(objects, "Service")[service]["spec"]["ports"]
                assert any(net.lets(pods.component, target, one["port"]) for one in port), (
                    pods.name,
                    service,
                )


def test_services_outside_are_reached_by_their_ports() -> None:
    net = Net(manifests(MINIMAL))
    for source in ("code-location", "api", "ingest", "run", "worker-default", "provision"):
        assert net.lets(source, OUTSIDE, 5432), source
        assert net.lets(source, OUTSIDE, 4222), source
        assert net.lets(source, OUTSIDE, 443), source
    assert net.lets("projection", OUTSIDE, 5432)
    assert not net.lets("projection", OUTSIDE, 443)
    assert not net.lets("ingest", OUTSIDE, 8080)


def test_ports_in_addresses_are_let_out() -> None:
    values = {
        "storage": {"tier": "minio", "minio": {"endpoint": "http://minio.other:9000"}},
        "tracing": {"endpoint": "http://collector:4999"},
    }
    net = Net(manifests(overlaid(MINIMAL, values)))
    assert net.lets("ingest", OUTSIDE, 9000)
    assert net.lets("ingest", OUTSIDE, 4999)
    assert not net.lets("ingest", OUTSIDE, 9001)


def test_only_tools_reach_everything_but_the_nodes_credentials() -> None:
    net = Net(manifests(MINIMAL))
    for source in net.components:
        assert net.lets(source, OUTSIDE, 25) == (source in ("run", "worker-default", "test")), source
        assert not net.lets(source, METADATA, 80), source
    google = Net(manifests(SCENARIOS["gke"]))
    assert google.lets("run", METADATA, 80)  # workload identity: credentials of the pod
    assert not google.lets("projection", METADATA, 80)


def test_who_has_a_token_reaches_the_cluster() -> None:
    objects = manifests(MINIMAL)
    net = Net(objects)
    for pods in [*pods_of(objects), run_pods(objects)]:
        if pods.spec["automountServiceAccountToken"]:
            assert net.lets(pods.component, OUTSIDE, 6443), pods.component


def test_strangers_reach_webserver_and_api_only_if_values_say_so() -> None:
    anybody = [{"namespaceSelector": {}}]
    net = Net(manifests(overlaid(KIND, {"networkPolicy": {"ingressFrom": anybody}})))
    open_to_all = {(target, port) for target in net.components for port in PORTS if net.lets("stranger", target, port)}
    assert open_to_all == {("webserver", 3000), ("api", 8700)}
    closed = Net(manifests(KIND))
    assert not any(closed.lets("stranger", target, port) for target in closed.components for port in PORTS)


def test_prometheus_reaches_the_processes() -> None:
    net = Net(manifests(overlaid(KIND, {"networkPolicy": {"monitoringFrom": [{"namespaceSelector": {}}]}})))
    for target in ("ingest", "projection", "worker-default"):
        assert net.lets("stranger", target, 8701)


def test_names_are_asked_by_every_pod() -> None:
    objects = manifests(MINIMAL)
    (default,) = (one for one in objects if one["metadata"]["name"] == "trial-noetl-dagster-default")
    [rule] = default["spec"]["egress"]
    named = {(one["protocol"], one["port"]) for one in rule.pop("ports")}
    assert named == {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)}
    assert not rule, "whatever the address: of DNS pods, of a node's cache, outside"
    for pods in [*pods_of(objects), run_pods(objects)]:
        assert default["spec"]["podSelector"]["matchLabels"].items() <= pods.labels.items()


def test_spark_s_executors_and_drivers_reach_each_other() -> None:
    net = Net(manifests(overlaid(MINIMAL, {"spark": {"mode": "kubernetes"}})))
    for driver in ("run", "worker-default"):
        assert net.lets("executor", driver, 7078)
        assert net.lets("executor", driver, 7079)
        assert net.lets(driver, "executor", 7079)
    assert net.lets("executor", "executor", 7079)  # shuffles
    assert not net.lets("executor", "code-location", 4000)


def test_dagster_s_own_chart_reaches_a_trial_s_services() -> None:
    open_to_them = SCENARIOS["dagster elsewhere"]
    assert Net(manifests(open_to_them)).lets("stranger", "postgresql", 5432)
    closed = overlaid(open_to_them, {"networkPolicy": {"servicesFrom": []}})
    assert not Net(manifests(closed)).lets("stranger", "postgresql", 5432)


def test_collectors_and_other_code_locations_are_reached() -> None:
    net = Net(manifests(SCENARIOS["everything"]))
    for source in ("api", "code-location", "ingest", "projection", "worker-default", "run"):
        assert net.lets(source, OUTSIDE, 4318), source
    for source in ("webserver", "daemon", "api"):
        assert net.lets(source, OUTSIDE, 4001), source
    assert not net.lets("ingest", OUTSIDE, 4001)


def test_only_the_login_s_pods_reach_the_webserver() -> None:
    """The example: its proxy leads to the webserver's Service, and its own Service and Ingress lead to the proxy."""
    objects = manifests(overlaid(MINIMAL, values_file("oauth2-proxy")))
    [proxy] = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "dagster-login"]
    labels = proxy["spec"]["template"]["metadata"]["labels"]
    [service] = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"] == "dagster-login"]
    [ingress] = of_kind(objects, "Ingress").values()
    assert service["spec"]["selector"].items() <= labels.items()
    [path] = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == "dagster-login"
    [container] = proxy["spec"]["template"]["spec"]["containers"]
    assert "--upstream=http://trial-noetl-dagster-webserver:3000" in container["args"]
    rules = of_kind(objects, "NetworkPolicy")["trial-noetl-dagster-webserver"]["spec"]["ingress"]
    peers = [peer for rule in rules for peer in rule["from"]]
    assert peers == [{"podSelector": {"matchLabels": labels}}]
