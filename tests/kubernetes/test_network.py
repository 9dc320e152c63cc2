"""What network policies mean, as the stand-in evaluates them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.kubernetes.cluster.network import Peer, Policies, Service

NAMESPACES = {"app": {"team": "a"}, "db": {"team": "b"}, "other": {}}
WEB = Peer("10.0.0.1", "app", {"role": "web"}, is_in_cluster=True)
JOB = Peer("10.0.0.2", "app", {"role": "job"}, is_in_cluster=True)
DB = Peer("10.0.0.3", "db", {"role": "db"}, {"sql": 5432}, is_in_cluster=True)
FAKE = Peer("10.0.0.4", "other", {"role": "db"}, is_in_cluster=True)
MIRROR = Peer("10.0.0.5", "db", {"role": "mirror"}, is_in_cluster=True)
OUTSIDE = Peer("192.0.2.7")
DNS = Service(Peer("10.0.0.9", "dns", {}, is_in_cluster=True), {53: 5353})
API = Peer("10.9.0.1", entity="kube-apiserver", is_in_cluster=True)


def policy(text: str) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": {"role": "web"}}, "policyTypes": ["Egress"], **yaml.safe_load(text)}
    return {"kind": "NetworkPolicy", "metadata": {"name": "p", "namespace": "app"}, "spec": spec}


BOTH = "egress: [{to: [{namespaceSelector: {matchLabels: {team: b}}, podSelector: {matchLabels: {role: db}}}]}]"
EITHER = "egress: [{to: [{namespaceSelector: {matchLabels: {team: b}}}, {podSelector: {matchLabels: {role: db}}}]}]"
BLOCK = "egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [192.0.2.0/28]}}]}]"


@pytest.mark.parametrize(
    ("text", "target", "port", "allowed"),
    [
        ("egress: []", DB, 5432, False),
        ("egress: [{}]", DB, 5432, True),
        ("{policyTypes: [Ingress]}", DB, 5432, True),
        ("{podSelector: {matchLabels: {role: job}}, egress: []}", DB, 5432, True),
        (BOTH, DB, 5432, True),
        (BOTH, FAKE, 5432, False),
        (EITHER, FAKE, 5432, False),
        (BOTH, MIRROR, 5432, False),
        (EITHER, MIRROR, 5432, True),
        ("egress: [{to: [{podSelector: {}}]}]", JOB, 1, True),
        ("egress: [{to: [{podSelector: {}}]}]", DB, 1, False),
        ("egress: [{to: [{namespaceSelector: {}}]}]", DB, 1, True),
        ("egress: [{to: [{namespaceSelector: {}}]}]", OUTSIDE, 1, False),
        (
            "egress: [{to: [{podSelector: {matchExpressions: [{key: role, operator: NotIn, values: [job]}]}}]}]",
            JOB,
            1,
            False,
        ),
        ("egress: [{ports: [{port: 5432}]}]", DB, 5432, True),
        ("egress: [{ports: [{port: 5432, protocol: UDP}]}]", DB, 5432, False),
        ("egress: [{ports: [{port: sql}]}]", DB, 5432, True),
        ("egress: [{ports: [{port: 5000, endPort: 6000}]}]", DB, 5432, True),
        (BLOCK, DB, 1, True),
        (BLOCK, OUTSIDE, 1, False),
        ("egress: [{ports: [{port: 53}]}]", DNS, 53, False),
        ("egress: [{ports: [{port: 5353}]}]", DNS, 53, True),
    ],
)
def test_a_policy_lets_through_what_it_says(text: str, target: Peer | Service, port: int, allowed: bool) -> None:
    assert Policies([policy(text)], NAMESPACES).let(WEB, target, port) == allowed


def test_both_ends_have_to_allow_and_policies_add_up() -> None:
    closed = policy("{podSelector: {}, policyTypes: [Ingress, Egress]}")
    out, into = (
        policy("egress: [{to: [{podSelector: {matchLabels: {role: job}}}]}]"),
        policy(
            "{podSelector: {matchLabels: {role: job}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}"
        ),
    )
    assert not Policies([closed, out], NAMESPACES).let(WEB, JOB, 1)
    assert not Policies([closed, into], NAMESPACES).let(WEB, JOB, 1)
    assert Policies([closed, out, into], NAMESPACES).let(WEB, JOB, 1)


def test_cilium_s_blocks_match_only_what_is_outside() -> None:
    objects: list[dict[str, Any]] = [policy("egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}]}]")]
    cilium = Policies(objects, NAMESPACES, cilium=True)
    assert cilium.let(WEB, OUTSIDE, 1)
    assert not cilium.let(WEB, DB, 1)
    assert not cilium.let(WEB, API, 6443)
    spec = {"endpointSelector": {"matchLabels": {"role": "web"}}, "egress": [{"toEntities": ["kube-apiserver"]}]}
    objects.append({"kind": "CiliumNetworkPolicy", "metadata": {"name": "c", "namespace": "app"}, "spec": spec})
    assert Policies(objects, NAMESPACES, cilium=True).let(WEB, API, 6443)
    assert not Policies(objects, NAMESPACES, cilium=True).let(WEB, DB, 1)
