"""Which connections network policies let through, by what they mean."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.cluster.store import Object

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """An end of a connection: a pod, a node, or something outside the cluster.

    Attributes:
        namespace: of a pod; empty for others.
        ports: the numbers of a pod's named ports.
        entity: what Cilium knows it as, such as ``kube-apiserver``.
        is_in_cluster: whether it is a pod or a node.
    """

    address: str
    namespace: str = ""
    labels: Labels = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    entity: str = ""
    is_in_cluster: bool = False


@dataclass(frozen=True)
class Service:
    """Pods behind an address. Policies see the connection after its translation."""

    backend: Peer
    ports: Mapping[int, int]


class Policies:
    """The policies of a cluster.

    Args:
        objects: of any kinds; those of policies count.
        namespaces: labels of namespaces by their names.
        cilium: blocks of addresses match neither pods nor nodes, and CiliumNetworkPolicies count.
    """

    def __init__(self, objects: Iterable[Object], namespaces: Mapping[str, Labels], *, cilium: bool = False) -> None:
        found = list(objects)
        self._policies = [one for one in found if one["kind"] == "NetworkPolicy"]
        self._own = [one for one in found if cilium and one["kind"] == "CiliumNetworkPolicy"]
        self._namespaces, self._cilium = namespaces, cilium

    def let(self, source: Peer, target: Peer | Service, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection gets through: its source may leave, and its target may be entered."""
        if isinstance(target, Service):
            return self.let(source, target.backend, target.ports[port], protocol)
        leaves = self._allowed("egress", "to", source, target, target, port, protocol)
        return leaves and self._allowed("ingress", "from", target, source, target, port, protocol)

    def _allowed(
        self, way: str, peers: str, subject: Peer, other: Peer, target: Peer, port: int, protocol: str
    ) -> bool:
        """Whether the policies of one end allow the other. Without a policy for that way, everything is allowed."""
        selecting = [
            one for one in self._policies if self._selects(one, subject) and way.title() in _types(one["spec"])
        ]
        entities = [
            entity
            for one in self._own
            if subject.namespace == one["metadata"]["namespace"]
            and matches(one["spec"]["endpointSelector"], subject.labels)
            for rule in one["spec"].get(way) or ()
            for entity in rule["toEntities"]
        ]
        if not selecting and not entities:
            return True
        if other.entity and other.entity in entities:
            return True
        return any(
            (not rule.get("ports") or any(_is_port(one, target, port, protocol) for one in rule["ports"]))
            and (not rule.get(peers) or any(self._is_peer(one, other, policy) for one in rule[peers]))
            for policy in selecting
            for rule in policy["spec"].get(way) or ()
        )

    def _selects(self, policy: Object, subject: Peer) -> bool:
        here = subject.namespace == policy["metadata"]["namespace"]
        return here and matches(policy["spec"]["podSelector"], subject.labels)

    def _is_peer(self, stated: Mapping[str, Any], other: Peer, policy: Object) -> bool:
        if "ipBlock" in stated:
            block, address = stated["ipBlock"], ipaddress.ip_address(other.address)
            if self._cilium and other.is_in_cluster:
                return False
            inside = address in ipaddress.ip_network(block["cidr"])
            return inside and not any(address in ipaddress.ip_network(one) for one in block.get("except", ()))
        if not other.namespace:
            return False
        if "namespaceSelector" in stated:
            if not matches(stated["namespaceSelector"], self._namespaces.get(other.namespace, {})):
                return False
        elif other.namespace != policy["metadata"]["namespace"]:
            return False
        return matches(stated.get("podSelector", {}), other.labels)


def matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    """Whether a label selector selects labels; an empty one selects all."""
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    for one in selector.get("matchExpressions") or ():
        value = labels.get(one["key"])
        match one["operator"]:
            case "In" if value not in one["values"]:
                return False
            case "NotIn" if value in one["values"]:
                return False
            case "Exists" if value is None:
                return False
            case "DoesNotExist" if value is not None:
                return False
    return True


def _types(spec: Mapping[str, Any]) -> list[str]:
    return list(spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])])


def _is_port(stated: Mapping[str, Any], target: Peer, port: int, protocol: str) -> bool:
    if stated.get("protocol", "TCP") != protocol:
        return False
    if "port" not in stated:
        return True
    first = target.ports.get(stated["port"]) if isinstance(stated["port"], str) else stated["port"]
    return first is not None and first <= port <= stated.get("endPort", first)
