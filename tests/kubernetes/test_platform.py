"""The platform as Helm installs it, its processes running: playbooks run, and survive losses and upgrades."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.helm.chart import overlaid
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.kubelet.process import unavailable
from tests.kubernetes.releases import Release, secrets_for, shared_with_pods, values_for
from tests.playbooks import text_of
from tests.waiting import PATIENCE_SECONDS, PROCESS_SECONDS, until
from tests.whole import FAN, SMALL, Fan

WORKERS = "worker-default"
PROCESSES = ("code-location", "daemon", "webserver", "api", "ingest", WORKERS)
SLOTS, ITEMS, REPLICAS = 2, 60, 2
ENDED_BY = """
SELECT current_index, worker_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.shard.done'
"""
RECORDED = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.completed'"
LOOP = """
workload: {folder: ""}
workflow:
  - step: start
    loop: {in: "{{ range(6) | list }}", iterator: n, spec: {mode: sequential}}
    tool:
      kind: python
      input: {n: "{{ n }}", folder: "{{ folder }}"}
      code: |
        import pathlib, time
        with pathlib.Path(folder, f"ran-{n}").open("a") as ran:
            ran.write("once\\n")
        while n == 3 and not pathlib.Path(folder, "open").exists():
            time.sleep(0.02)
        result = n * n
    next: [{step: total}]
  - step: total
    tool: {kind: python, input: {squares: "{{ start.results }}"}, code: "result = sum(squares)"}
"""
PLAYBOOKS = {f"{name}.yaml": text_of(name, text) for name, text in {"fan": FAN, "small": SMALL, "loop": LOOP}.items()}


def restarts(release: Release) -> dict[str, int]:
    return {
        pod["metadata"]["name"]: one["restartCount"]
        for pod in release.pods()
        for one in pod["status"].get("containerStatuses", ())
        if one["restartCount"]
    }


async def test_a_fan_out_runs_on_the_workers_of_a_release(cluster: Cluster, settings: Settings, tmp_path: Path) -> None:
    """With what that needs and no more, each once; the test drives."""
    release = Release(cluster, secrets_for(settings))
    values = overlaid(
        values_for(settings),
        shared_with_pods(release, tmp_path / "shared"),
        {
            "dagster": {"enabled": False, "extraLocations": [{"host": "nobody", "port": 4000}]},
            "api": {"replicas": 1},
            "ingest": {"replicas": 1},
            "workers": {"defaults": {"replicas": 1, "slots": SLOTS}},
        },
    )
    await asyncio.to_thread(release.install, values)
    assert not restarts(release), "provisioning came first: no process waited for a schema or a stream"
    engine = await Engine.open(settings)
    fan = await Fan.start(engine, tmp_path / "shared", ITEMS)
    await fan.is_whole()
    await asyncio.to_thread(release.test)
    await engine.close()


@dataclass
class Platform:
    """A release with all that the chart has, and its HTTP API as operators call it."""

    release: Release
    values: dict[str, Any]
    engine: Engine
    api: httpx.AsyncClient
    folder: Path

    async def execute(self, path: str, **workload: Any) -> int:
        answer = await self.api.post("/execute", json={"path": f"tests/{path}", "workload": workload})
        assert answer.status_code == 202, answer.text
        return int(answer.json()["execution_id"])

    async def until_ended(self, execution_id: int) -> str:
        async def ended() -> str:
            answer = await self.api.get(f"/{execution_id}")
            status: str = answer.json()["status"]
            return "" if status == "RUNNING" else status

        return await until(ended, self.release.cluster.said())

    async def works(self) -> None:
        assert await self.until_ended(await self.execute("small")) == "COMPLETED"

    async def fan(self, name: str, held: int = REPLICAS * SLOTS) -> Fan:
        """A fan-out whose first items wait."""
        ledger = self.folder / f"{name}.ledger"
        ledger.touch()
        execution_id = await self.execute("fan", ledger=str(ledger), items=ITEMS, held=held)
        fan = Fan.driven_elsewhere(self.engine, ledger, execution_id, ITEMS)
        await until(lambda: set(range(held)) <= set(fan.begun), "items that run")
        return fan

    async def loop(self, name: str) -> tuple[int, Path, list[dict[str, Any]]]:
        """An execution that is held in the middle of a loop, the folder that it writes to, and the pods of its run."""
        folder = self.folder / name
        folder.mkdir()
        execution_id = await self.execute("loop", folder=str(folder))
        await until(lambda: ran(folder)[3], self.release.cluster.said())

        async def recorded() -> bool:
            return bool(await self.engine.runtime.pool.fetchval(RECORDED, execution_id) == 3)

        await until(recorded, "three items in the log")
        return execution_id, folder, self.runs()

    def runs(self) -> list[dict[str, Any]]:
        """The pods of runs that have not ended."""
        return [one for one in self.release.pods("dagster/run-id") if one["status"]["phase"] == "Running"]

    async def total(self, execution_id: int) -> Any:
        state = (await self.engine.runtime.load(execution_id)).state
        assert state.status is ExecutionStatus.COMPLETED, state.error
        return state.latest["total"].envelope["data"]


def ran(folder: Path) -> list[int]:
    """How often each item of the loop ran."""
    paths = [folder / f"ran-{n}" for n in range(6)]
    return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]


@pytest.fixture(scope="module")
def installed(module_settings: Settings) -> Iterator[tuple[Release, dict[str, Any], Path]]:
    if reason := unavailable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="noetl-cluster-"))
    cluster = Cluster(folder)
    try:
        release = Release(cluster, secrets_for(module_settings))
        shared = folder / "shared"
        values = overlaid(
            values_for(module_settings),
            shared_with_pods(release, shared),
            {
                "playbooks": {"files": PLAYBOOKS},
                "dagster": {"webserver": {"replicas": 1}},
                "workers": {"defaults": {"slots": SLOTS}, "drainSeconds": int(PROCESS_SECONDS)},
            },
        )
        before = set(release.objects())
        release.install(values)
        assert not restarts(release)
        yield release, values, shared
        release.uninstall()
        left = {
            key
            for key, one in release.objects().items()
            if key not in before and "dagster/run-id" not in (one["metadata"].get("labels") or {})
        }
        assert not {key for key in left if key[0] != "Pod"}, "nothing is left but runs"
    finally:
        cluster.close()
        shutil.rmtree(folder)


@pytest.fixture
async def platform(
    installed: tuple[Release, dict[str, Any], Path], module_settings: Settings
) -> AsyncIterator[Platform]:
    release, values, folder = installed
    service = release.cluster.store.need("Service", release.namespace, "trial-noetl-dagster-api")
    engine = await Engine.open(module_settings)
    async with httpx.AsyncClient(
        base_url=f"http://{service['spec']['clusterIP']}:8700/api/executions",
        headers={"Authorization": "Bearer token"},
        timeout=PATIENCE_SECONDS,
        trust_env=False,
    ) as api:
        yield Platform(release, values, engine, api, folder)
    await engine.close()


@pytest.mark.slow
async def test_a_run_is_a_job_with_the_rights_of_runs(platform: Platform) -> None:
    execution_id, folder, [pod] = await platform.loop("ends")
    assert pod["spec"]["serviceAccountName"] == "trial-noetl-dagster-run"
    (folder / "open").touch()
    assert await platform.until_ended(execution_id) == "COMPLETED"
    assert await platform.total(execution_id) == sum(n * n for n in range(6))
    assert ran(folder) == [1] * 6
    await asyncio.to_thread(platform.release.test)


@pytest.mark.slow
async def test_a_cancelled_execution_leaves_no_job(platform: Platform) -> None:
    execution_id, folder, _ = await platform.loop("cancelled")
    answer = await platform.api.post(f"/{execution_id}/cancel", json={})
    assert answer.json().get("cancelled"), answer.text
    assert await platform.until_ended(execution_id) == "CANCELLED"
    await until(lambda: not platform.runs(), platform.release.cluster.said())
    assert ran(folder) == [1, 1, 1, 1, 0, 0]


@pytest.mark.slow
async def test_another_run_resumes_after_a_lost_pod(platform: Platform) -> None:
    execution_id, folder, [pod] = await platform.loop("lost")
    platform.release.cluster.lose(pod["metadata"]["name"], platform.release.namespace)
    (folder / "open").touch()
    assert await platform.until_ended(execution_id) == "COMPLETED"
    assert await platform.total(execution_id) == sum(n * n for n in range(6))
    assert ran(folder) == [1, 1, 1, 2, 1, 1], "only the item that the lost pod was at ran again"


@pytest.mark.slow
async def test_every_process_is_killed_in_the_middle(platform: Platform) -> None:
    fan = await platform.fan("killed")
    release = platform.release
    for component in PROCESSES:
        for name in release.names(component):
            release.cluster.lose(name, release.namespace)
    await until(lambda: len(restarts(release)) >= len(PROCESSES), "the kubelet to notice")
    fan.go()
    await fan.is_whole(again=range(ITEMS))
    await platform.works()


@pytest.mark.slow
async def test_everything_is_rolled_while_a_run_goes_on(platform: Platform) -> None:
    """To another image and more slots, and back."""
    release = platform.release
    changed = overlaid(platform.values, {"image": {"tag": "0.2.0"}, "workers": {"defaults": {"slots": SLOTS + 1}}})
    for slots, roll in ((SLOTS, lambda: release.upgrade(changed)), (SLOTS + 1, release.rollback)):
        held = REPLICAS * slots  # no slot is left for the others
        before = {component: release.names(component) for component in PROCESSES}
        fan = await platform.fan(f"{slots}-slots", held)
        await asyncio.to_thread(roll)
        after = {component: release.names(component) for component in PROCESSES}
        assert all(after[one] and not after[one] & before[one] for one in PROCESSES)
        await fan.until_done(ITEMS - held)
        fan.go()  # the old workers end what they have begun
        await fan.is_whole()
        ended_by = dict(await platform.engine.runtime.pool.fetch(ENDED_BY, fan.execution_id))
        assert len(set(ended_by.values())) > REPLICAS, "the new workers have joined in"
        await platform.works()
