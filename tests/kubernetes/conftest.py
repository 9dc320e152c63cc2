"""The stand-in for a cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kubernetes.config
import pytest

from noetl_dagster.tools.commands import cluster as commands_cluster
from noetl_dagster.tools.commands import container
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.kubelet.process import unavailable


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of the test's own, which ends with it and every process in it."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="noetl-cluster-"))
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


@pytest.fixture
def connected(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container tool of this process uses the cluster, and looks at it often."""
    # the client reads KUBECONFIG once, when it is imported
    for module in (kubernetes.config, kubernetes.config.kube_config):
        monkeypatch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig))
    monkeypatch.setattr(container, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(commands_cluster, "LOOK_SECONDS", 0.1)
