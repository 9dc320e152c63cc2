"""The platform installed by Helm with its own processes: they work, and are rolled in the middle of a fan-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.helm.chart import overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.processes import secrets_for, values_for
from tests.kubernetes.releases import Release
from tests.waiting import until
from tests.whole import Fan

SLOTS, ITEMS = 2, 60
CLAIMS = "SELECT DISTINCT worker_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed'"


@pytest.fixture
def release(cluster: Cluster, settings: Settings) -> Release:
    made = Release(cluster)
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": secrets_for(settings)}
    cluster.create(secret | {"metadata": {"name": "noetl", "namespace": made.namespace}})
    return made


def values(settings: Settings, shared: Path) -> dict[str, Any]:
    """What the proof needs and no more, each once; pods have a folder of the test's at its own path."""
    found = values_for(settings)
    del found["workers"]
    return overlaid(
        found,
        {
            "dagster": {"enabled": False, "extraLocations": [{"host": "nobody", "port": 4000}]},
            "api": {"replicas": 1},
            "ingest": {"replicas": 1},
            "workers": {"defaults": {"replicas": 1, "slots": SLOTS}, },
            "pod": {
                "extraVolumes": [{"name": "shared", "hostPath": {"path": str(shared)}}],
                "extraVolumeMounts": [{"name": "shared", "mountPath": str(shared)}],
            },
        },
    )


async def said(release: Release, call: Callable[..., None], *given: Any) -> None:
    """A call of Helm's, beside the test; with what containers wrote where it fails."""
    try:
        await asyncio.to_thread(call, *given)
    except Exception as error:
        raise AssertionError(f"{error}\n{release.cluster.said()}") from error


async def test_workers_are_rolled_in_the_middle_of_a_fan_out(
    release: Release, settings: Settings, tmp_path: Path
) -> None:
    import time
    t = time.monotonic()
    shared = tmp_path / "shared"
    shared.mkdir()
    first = values(settings, shared)
    await said(release, release.install, first)
    print("install", time.monotonic() - t); t = time.monotonic()
    engine = await Engine.open(settings)
    fan = await Fan.start(engine, shared, ITEMS, held=SLOTS)
    await until(lambda: len(fan.begun) == SLOTS, "two items that run")
    before = release.names("worker-default")
    [old] = before
    upgraded = overlaid(first, {"workers": {"defaults": {"slots": SLOTS + 1}}})
    await said(release, release.upgrade, upgraded)
    print("upgrade", time.monotonic() - t); t = time.monotonic()
    print(before, release.names("worker-default"), len(fan.begun))
    await fan.until_done(ITEMS - SLOTS)
    fan.go()
    await fan.is_whole()
    print("whole", time.monotonic() - t); t = time.monotonic()
    print(await engine.runtime.pool.fetch(CLAIMS, fan.execution_id))
    await said(release, release.test)
    print("test", time.monotonic() - t); t = time.monotonic()
    await said(release, release.rollback)
    print("rollback", time.monotonic() - t); t = time.monotonic()
    await engine.close()
