"""Network policies let through what components need, and nothing else: the meaning of what is rendered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import (
    KIND,
    MINIMAL,
    NAMESPACE,
    RELEASE,
    SCENARIOS,
    Manifest,
    manifests,
    of_kind,
    overlaid,
    pods_of,
    values_file,
)
from tests.helm.launched import run_pods
from tests.kubernetes.cluster.network import Peer, Policies, Service

NAMESPACES = {
    name: {"kubernetes.io/metadata.name": name}
    for name in (NAMESPACE, "ingress", "monitoring", "databases", "kube-system", "others")
}


def other(namespace: str, app: str, address: str) -> Peer:
    return Peer(address, namespace, {"app": app}, is_in_cluster=True)


CONTROLLER = other("ingress", "controller", "10.0.1.1")
PROMETHEUS = other("monitoring", "prometheus", "10.0.1.2")
STRANGER = other("others", "stranger", "10.0.1.3")
NEIGHBOUR = other(NAMESPACE, "neighbour", "10.0.1.4")
POSTGRESQL = other("databases", "postgresql", "10.0.1.5")
COLLECTOR = other("monitoring", "collector", "10.0.1.6")
DNS = Service(other("kube-system", "dns", "10.0.1.7"), {53: 53})
OPENSHIFT_DNS = Service(other("openshift-dns", "dns", "10.0.1.8"), {53: 5353})
NODE_DNS = Peer("169.254.20.10", is_in_cluster=True)
API_SERVER = Peer("10.9.0.1", entity="kube-apiserver", is_in_cluster=True)
OUTSIDE, OUTSIDE_6 = Peer("192.0.2.7"), Peer("2001:db8::7")
METADATA, METADATA_6 = Peer("169.254.169.254"), Peer("fd00:ec2::254")


class Net:
    """The policies of a release, and its pods."""

    def __init__(self, objects: list[Manifest], *, cilium: bool = False) -> None:
        self._policies = Policies(objects, NAMESPACES, cilium=cilium)
        labels = {pods.component: dict(pods.labels) for pods in [*pods_of(objects), run_pods(objects)]}
        for policy in of_kind(objects, "NetworkPolicy").values():  # of pods that steps and Spark make
            selected = policy["spec"]["podSelector"]["matchLabels"]
            if "app.kubernetes.io/component" in selected:
                labels.setdefault(selected["app.kubernetes.io/component"], selected)
        self.pods = {
            name: Peer(f"10.0.0.{number}", NAMESPACE, one, is_in_cluster=True)
            for number, (name, one) in enumerate(sorted(labels.items()), 1)
        }

    def lets(self, source: str | Peer, target: str | Peer | Service, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection gets through; texts are components of the release."""
        ends = [self.pods[end] if isinstance(end, str) else end for end in (source, target)]
        assert isinstance(ends[0], Peer)
        return self._policies.let(ends[0], ends[1], port, protocol)


TRIAL = {
    "webserver": {("postgresql", 5432), ("minio", 9000), ("code-location", 4000)},
    "daemon": {("postgresql", 5432), ("minio", 9000), ("code-location", 4000)},
    "code-location": {("postgresql", 5432), ("nats", 4222), ("minio", 9000)},
    "api": {("postgresql", 5432), ("nats", 4222), ("minio", 9000), ("code-location", 4000)},
    "ingest": {("postgresql", 5432), ("nats", 4222), ("minio", 9000)},
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

PORTS = {3000, 4000, 4222, 5432, 7078, 8222, 8700, 8701, 9000, 9001}
SAME_SERVER = {("nats", 8222): ("nats", 4222), ("minio", 9001): ("minio", 9000)}
"""Ports that are open with another one of the same server."""


def test_a_trial_s_components_reach_what_they_need_and_nothing_else() -> None:
    net = Net(manifests(KIND))
    assert net.pods.keys() == TRIAL.keys()
    for source, wanted in TRIAL.items():
        reached = {(target, port) for target in TRIAL for port in PORTS if net.lets(source, target, port)}
        assert reached == wanted | {extra for extra, port in SAME_SERVER.items() if port in wanted}, source


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "bare"])
def test_every_address_in_the_settings_is_let_through(scenario: str) -> None:
    """What a process is told to connect to inside the release, it may."""
    objects = manifests(SCENARIOS[scenario])
    net = Net(objects)
    users = {"api": ("worker", "run", "test"), "minio": ("run", "worker", "api", "code", "ingest", "webserver")}
    for name, service in of_kind(objects, "Service").items():
        target = next(p for p in pods_of(objects) if service["spec"]["selector"].items() <= p.labels.items()).component
        for pods in [*pods_of(objects), run_pods(objects)]:
            asked = any(f"//{name}:" in value for value in pods.variables(objects).values())
            if asked and pods.component.startswith(users.get(target, ())):
                ports = [one["port"] for one in service["spec"]["ports"]]
                assert any(net.lets(pods.component, target, port) for port in ports), (pods.name, name)


ALL = (
    "api",
    "code-location",
    "daemon",
    "ingest",
    "provision",
    "run",
    "test",
    "webserver",
    "worker-default",
)
STORES = ("api", "code-location", "ingest", "provision", "run", "test", "worker-default")
TOOLS = ("run", "test", "worker-default")
BY_SELECTOR = {
    "networkPolicy": {
        "postgresql": {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "databases"}}}]},
        "tools": {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    }
}
CILIUM = {"networkPolicy": {"cilium": True}}

REACHED: list[tuple[dict[str, Any], str, Peer | Service, int, tuple[str, ...]]] = [
    ({}, "TCP", OUTSIDE, 5432, ("daemon", "webserver", *STORES)),
    ({}, "TCP", OUTSIDE_6, 5432, ("daemon", "webserver", *STORES)),
    ({}, "TCP", POSTGRESQL, 5432, ("daemon", "webserver", *STORES)),
    ({}, "TCP", OUTSIDE, 4222, STORES),
    ({}, "TCP", API_SERVER, 6443, ("api", "daemon", "webserver", *TOOLS)),
    ({}, "TCP", API_SERVER, 16443, ("api", "daemon", "webserver", *TOOLS)),
    ({}, "TCP", OUTSIDE, 25, TOOLS),
    ({}, "UDP", OUTSIDE, 25, TOOLS),
    ({}, "TCP", STRANGER, 25, TOOLS),
    ({}, "TCP", METADATA, 80, ()),
    ({}, "TCP", METADATA_6, 80, ()),
    *(({}, protocol, dns, 53, ALL) for protocol in ("UDP", "TCP") for dns in (DNS, OPENSHIFT_DNS, NODE_DNS)),
    ({"networkPolicy": {"dnsPorts": [53]}}, "UDP", OPENSHIFT_DNS, 53, TOOLS),
    (BY_SELECTOR, "TCP", POSTGRESQL, 5432, ("daemon", "webserver", *STORES)),
    (BY_SELECTOR, "TCP", STRANGER, 5432, ()),
    (BY_SELECTOR, "TCP", OUTSIDE, 5432, TOOLS),
    (CILIUM, "TCP", API_SERVER, 6443, ("api", "daemon", "webserver")),
    (CILIUM, "TCP", POSTGRESQL, 5432, ("daemon", "webserver", *STORES)),
    (CILIUM, "TCP", STRANGER, 25, TOOLS),
    ({"tracing": {"endpoint": "http://collector:4999"}}, "TCP", COLLECTOR, 4999, STORES),
    (
        {"dagster": {"extraLocations": [{"host": "o", "port": 4001}]}},
        "TCP",
        STRANGER,
        4001,
        ("api", "daemon", "webserver", *TOOLS),
    ),
]
"""Values, protocol, whom, port, and who reaches it."""


@pytest.mark.parametrize("case", range(len(REACHED)), ids=str)
def test_who_reaches_what(case: int) -> None:
    values, protocol, target, port, sources = REACHED[case]
    net = Net(manifests(overlaid(MINIMAL, values)), cilium="cilium" in values.get("networkPolicy", {}))
    reaching = {name for name in ALL if net.lets(name, target, port, protocol)}
    wanted = set(sources) - ({"provision"} if target is COLLECTOR else set())  # which has no tracing
    assert reaching == wanted


@pytest.mark.parametrize("scenario", ["gke", "eks"])
def test_credentials_of_pods_are_asked_for_and_those_of_nodes_are_not(scenario: str) -> None:
    net = Net(manifests(SCENARIOS[scenario]))
    agents = {"gke": METADATA, "eks": Peer("169.254.170.23")}
    assert net.lets("run", agents[scenario], 80)
    assert net.lets("run", METADATA, 80) == (scenario == "gke")


ENTERED: list[tuple[dict[str, Any], Peer, set[tuple[str, int]]]] = [
    ({}, STRANGER, set()),
    ({}, NEIGHBOUR, set()),
    ({"ingressFrom": [{"namespaceSelector": {}}]}, STRANGER, {("webserver", 3000), ("api", 8700)}),
    ({"ingressFrom": [{"podSelector": {"matchLabels": {"app": "neighbour"}}}]}, STRANGER, set()),
    (
        {"ingressFrom": [{"podSelector": {"matchLabels": {"app": "neighbour"}}}]},
        NEIGHBOUR,
        {("webserver", 3000), ("api", 8700)},
    ),
    (
        {"ingressFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]},
        CONTROLLER,
        {("webserver", 3000), ("api", 8700)},
    ),
    ({"ingressFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}, OUTSIDE, {("webserver", 3000), ("api", 8700)}),
    (
        {"monitoringFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]},
        PROMETHEUS,
        {("api", 8700), *((name, 8701) for name in ("ingest", "worker-default"))},
    ),
    ({"servicesFrom": [{"namespaceSelector": {}}]}, STRANGER, {("postgresql", 5432), ("nats", 4222), ("minio", 9000)}),
]


@pytest.mark.parametrize("case", range(len(ENTERED)), ids=str)
def test_who_enters_where(case: int) -> None:
    policy, source, wanted = ENTERED[case]
    net = Net(manifests(overlaid(KIND, {"networkPolicy": policy})))
    entered = {(target, port) for target in net.pods for port in PORTS if net.lets(source, target, port)}
    assert entered - SAME_SERVER.keys() == wanted


def test_who_has_a_token_reaches_the_cluster() -> None:
    objects = manifests(overlaid(MINIMAL, {"runs": {"containers": True}, "workers": {"containers": True}}))
    net = Net(objects)
    for pods in [*pods_of(objects), run_pods(objects)]:
        if pods.spec["automountServiceAccountToken"]:
            assert net.lets(pods.component, API_SERVER, 6443), pods.component


def test_spark_s_executors_and_drivers_reach_each_other() -> None:
    net = Net(manifests(overlaid(MINIMAL, {"spark": {"mode": "kubernetes"}})))
    for driver in ("run", "worker-default"):
        assert net.lets("executor", driver, 7078)
        assert net.lets("executor", driver, 7079)
        assert net.lets(driver, "executor", 7079)
    assert net.lets("executor", "executor", 7079)  # shuffles
    assert not net.lets("executor", "code-location", 4000)


def test_only_the_login_s_pods_reach_the_webserver() -> None:
    """The example: its Ingress and Service lead to the proxy, and the proxy to the webserver's Service."""
    objects = manifests(overlaid(MINIMAL, values_file("oauth2-proxy")))
    [proxy] = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "dagster-login"]
    template = proxy["spec"]["template"]
    service = of_kind(objects, "Service")["dagster-login"]
    [path] = of_kind(objects, "Ingress")["dagster-login"]["spec"]["rules"][0]["http"]["paths"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert path["backend"]["service"]["name"] == "dagster-login"
    assert f"--upstream=http://{RELEASE}-noetl-dagster-webserver:3000" in template["spec"]["containers"][0]["args"]
    net = Net([one for one in objects if one["metadata"]["name"] != "dagster-login"])
    login = Peer("10.0.1.9", NAMESPACE, template["metadata"]["labels"], is_in_cluster=True)
    assert net.lets(login, "webserver", 3000)
    assert not net.lets(NEIGHBOUR, "webserver", 3000)
