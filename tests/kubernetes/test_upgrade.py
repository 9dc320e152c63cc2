"""The platform as Helm installs it, its processes running: they work, and are rolled in the middle of a fan-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.helm.chart import overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.store import Object
from tests.kubernetes.processes import SERVICE, secrets_for, values_for
from tests.kubernetes.releases import Release
from tests.playbooks import text_of
from tests.waiting import PATIENCE_SECONDS, PROCESS_SECONDS, until
from tests.whole import FAN, SMALL, Fan, small

SLOTS, ITEMS = 2, 60
WORKERS = "worker-default"
ROLLED = ("code-location", "daemon", "webserver", "api", "ingest", WORKERS, "worker-gpu")
ENDED_BY = """
SELECT current_index, worker_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.shard.done'
"""


@pytest.fixture
def release(cluster: Cluster, settings: Settings) -> Release:
    """Nothing is installed yet; what production has before is there."""
    made = Release(cluster)
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": secrets_for(settings)}
    cluster.create(secret | {"metadata": {"name": "noetl", "namespace": made.namespace}})
    return made


def shared_with_pods(release: Release, folder: Path) -> dict[str, Any]:
    """Values with which pods have a folder of the test's, at its own path, as a claim: they may mount no host's."""
    metadata = {"name": "shared", "namespace": release.namespace}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    release.cluster.create(claim)
    folder.mkdir()
    place = release.cluster.folder / "claims" / release.namespace / "shared"
    place.parent.mkdir(parents=True)
    place.symlink_to(folder)
    return {
        "pod": {
            "extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            "extraVolumeMounts": [{"name": "shared", "mountPath": str(folder)}],
        }
    }


async def done(release: Release, call: Callable[..., None], *given: Any) -> None:
    """A call of Helm's, beside the test; with what containers wrote where it fails."""
    try:
        await asyncio.to_thread(call, *given)
    except Exception as error:
        raise AssertionError(f"{error}\n{release.cluster.said()}") from error


def restarts(release: Release) -> dict[str, int]:
    return {
        pod["metadata"]["name"]: one["restartCount"]
        for pod in release.cluster.pods(namespace=release.namespace)
        for one in pod["status"].get("containerStatuses", ())
        if one["restartCount"]
    }


def slots(pod: Object) -> str:
    [found] = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "NOETL_WORKER_SLOTS"]
    return str(found["value"])


async def test_workers_are_rolled_in_the_middle_of_a_fan_out(
    release: Release, settings: Settings, tmp_path: Path
) -> None:
    """With what that needs and no more, each once; the test drives."""
    given = values_for(settings)
    del given["workers"]["pools"]
    given = overlaid(
        given,
        shared_with_pods(release, tmp_path / "shared"),
        {
            "dagster": {"enabled": False, "extraLocations": [{"host": "nobody", "port": 4000}]},
            "api": {"replicas": 1},
            "ingest": {"replicas": 1},
            "workers": {"defaults": {"replicas": 1, "slots": SLOTS}, "drainSeconds": int(PROCESS_SECONDS)},
        },
    )
    await done(release, release.install, given)
    assert not restarts(release), "provisioning came first: nobody waited for a schema or a stream"
    [old] = release.names(WORKERS)
    [old_process] = release.cluster.processes(old, release.namespace).values()
    others = {name: release.names(name) for name in ("api", "ingest")}

    engine = await Engine.open(settings)
    fan = await Fan.start(engine, tmp_path / "shared", ITEMS, held=SLOTS)
    await until(lambda: set(range(SLOTS)) <= set(fan.begun), "items that run")
    await done(release, release.upgrade, overlaid(given, {"workers": {"defaults": {"slots": SLOTS + 1}}}))
    assert {name: release.names(name) for name in others} == others, "only who reads it is rolled"
    [new] = release.pods(WORKERS)
    assert slots(new) == str(SLOTS + 1)
    await fan.until_done(ITEMS - SLOTS)
    assert release.cluster.processes(old, release.namespace), "it drains: it ends what it has begun"
    fan.go()
    await fan.is_whole()
    ended_by = dict(await engine.runtime.pool.fetch(ENDED_BY, fan.execution_id))
    assert {item for item, worker in ended_by.items() if worker.endswith(f":{old_process}")} >= set(range(SLOTS))
    assert len(set(ended_by.values())) == 2, "the new one has taken over"
    await until(lambda: release.cluster.store.get("Pod", release.namespace, old) is None, "its end")

    await done(release, release.test)
    await done(release, release.rollback)
    [again] = release.pods(WORKERS)
    assert slots(again) == str(SLOTS)
    state = await engine.run(small())
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert not restarts(release)
    await engine.close()


class Api:
    """The HTTP API of a release, as its operators call it."""

    def __init__(self, release: Release) -> None:
        service = release.cluster.store.need("Service", release.namespace, f"{SERVICE}api")
        self._client = httpx.AsyncClient(
            base_url=f"http://{service['spec']['clusterIP']}:8700/api/executions",
            headers={"Authorization": "Bearer token"},
            timeout=PATIENCE_SECONDS,
            trust_env=False,
        )

    async def execute(self, path: str, **workload: Any) -> int:
        answer = await self._client.post("/execute", json={"path": path, "workload": workload})
        assert answer.status_code == 202, answer.text
        return int(answer.json()["execution_id"])

    async def status(self, execution_id: int) -> str:
        answer = await self._client.get(f"/{execution_id}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["status"])

    async def close(self) -> None:
        await self._client.aclose()


@pytest.mark.slow
async def test_everything_is_rolled_while_a_run_goes_on(release: Release, settings: Settings, tmp_path: Path) -> None:
    """All that the chart has, as many as it has by default: installed, upgraded to another image, rolled back, removed."""
    shared = tmp_path / "shared"
    mounted = shared_with_pods(release, shared)
    before = set(release.objects())
    given = overlaid(
        values_for(settings),
        mounted,
        {
            "playbooks": {"files": {"fan.yaml": text_of("fan", FAN), "small.yaml": text_of("small", SMALL)}},
            "dagster": {"webserver": {"replicas": 1}},
            "workers": {"defaults": {"slots": SLOTS}, "drainSeconds": int(PROCESS_SECONDS)},
        },
    )
    await done(release, release.install, given)
    assert not restarts(release)
    first = {name: release.names(name) for name in ROLLED}
    assert all(first.values())
    engine = await Engine.open(settings)
    api = Api(release)

    async def completed(execution_id: int) -> bool:
        return await api.status(execution_id) == "COMPLETED"

    async def works() -> None:
        execution_id = await api.execute("tests/small")
        await until(lambda: completed(execution_id), release.cluster.said())

    await works()
    held = 2 * SLOTS
    ledger = shared / "fan.ledger"
    ledger.touch()
    execution_id = await api.execute("tests/fan", ledger=str(ledger), items=ITEMS, held=held)
    fan = Fan.driven_elsewhere(engine, ledger, execution_id, ITEMS)
    await until(lambda: set(range(held)) <= set(fan.begun), "items that run")
    await done(release, release.upgrade, overlaid(given, {"image": {"tag": "0.2.0"}}))
    second = {name: release.names(name) for name in ROLLED}
    assert all(second[name] and not second[name] & first[name] for name in ROLLED)
    await fan.until_done(ITEMS - held)
    fan.go()
    await fan.is_whole()
    await works()
    await done(release, release.test)

    ledger = shared / "again.ledger"
    ledger.touch()
    execution_id = await api.execute("tests/fan", ledger=str(ledger), items=ITEMS, held=held)
    fan = Fan.driven_elsewhere(engine, ledger, execution_id, ITEMS)
    await until(lambda: set(range(held)) <= set(fan.begun), "items that run")
    await done(release, release.rollback)
    assert all(not release.names(name) & second[name] for name in ROLLED)
    await fan.until_done(ITEMS - held)
    fan.go()
    await fan.is_whole()
    await works()
    await api.close()
    await engine.close()

    await done(release, release.uninstall)

    def left() -> set[tuple[str, str]]:
        return {
            key
            for key, one in release.objects().items()
            if key not in before and "dagster/run-id" not in (one["metadata"].get("labels") or {})
        }

    await until(lambda: not left(), f"nothing to be left but runs: {left()}")
