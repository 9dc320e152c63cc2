"""A stand-in for a Kubernetes cluster: its API over HTTPS, its controllers, and pods that are processes of this machine.

For what talks to a cluster: dagster-k8s, the container tool, Helm. Every object is checked against the schemas of
Kubernetes; what a service account may not do is refused; a container's command runs with its environment, its mounts
and a root of its own. What it leaves out: nodes, images, networks of their own (each pod has a loopback address),
users inside containers, and most defaults that a real API server fills in.
"""

from __future__ import annotations

from tests.kubernetes.cluster.cluster import Cluster

__all__ = ["Cluster"]
