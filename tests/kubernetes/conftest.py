"""The stand-in for a cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
