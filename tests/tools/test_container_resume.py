"""The jobs of the container tool when processes are killed, stopped and cancelled: as many as calls that were asked for."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import kubernetes.config
import pytest
import yaml

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.settings import EventTransport, Settings
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.commands import container
from noetl_dagster.tools.commands.jobs import CALL, job_manifest
from noetl_dagster.tools.registry import tool_for
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.context import own_context
from tests.drivers import drive
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.conftest import cluster, connected
from tests.playbooks import playbook
from tests.pool import working
from tests.processes import StartProcess, killed_in_the_end
from tests.tools.chunk_log import NoLog
from tests.tools.test_job_manifests import call
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["cluster", "connected"]

pytestmark = pytest.mark.usefixtures("connected")

SLOW = "echo once >> /out/ran; while [ ! -e /out/go ]; do sleep 0.05; done; echo the end"
FAILS_FIRST = "echo once >> /out/ran; [ $(wc -l < /out/ran) = 1 ] && exit 3; " + SLOW.partition("; ")[2]
STEP = """
workload: {out: "", command: ""}
workflow:
  - step: work
    spec: {dispatch: DISPATCH}
    tool:
      kind: container
      image: busybox
      command: "{{ command }}"
      volumes: [{name: out, hostPath: {path: "{{ out }}"}}]
      volume_mounts: [{name: out, mountPath: /out}]
      MORE
"""
LIMITED = """
workload: {out: ""}
workflow:
  - step: work
    tool:
      - name: first
        kind: container
        image: busybox
        command: sleep 1000
        spec: {timeout: 1, policy: {rules: [{when: "{{ error is defined }}", then: {do: continue}}]}}
      - name: second
        kind: python
        input: {gate: "{{ out }}/go", kind: "{{ first.error.kind }}"}
        code: |
          import pathlib, time
          while not pathlib.Path(gate).exists():
              time.sleep(0.02)
          result = kind
"""
IN_ONE_COMMAND = (
    "spec: {policy: {rules: [{when: '{{ error is defined }}', then: {do: retry, attempts: 2, delay: 0.05}}]}}"
)


def of_step(more: str = "", dispatch: str = "inline") -> Any:
    return playbook(STEP.replace("DISPATCH", dispatch).replace("MORE", more))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Workers that are gone are missed in a test's time."""
    return settings.model_copy(
        update={
            "worker_heartbeat_seconds": 0.5,
            "command_heartbeat_seconds": 0.5,
            "command_heartbeat_timeout_seconds": 3.0,
            "event_transport": EventTransport.DIRECT,
        }
    )


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    yield engine
    await engine.close()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What the containers see as ``/out``."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def start() -> Iterator[StartProcess]:
    with killed_in_the_end() as start:
        yield start


def variables(settings: Settings, cluster: Cluster) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "KUBECONFIG": str(cluster.kubeconfig), **embedded.environment(settings)}


def ran(out: Path) -> int:
    """How often a container began."""
    path = out / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


def ends(cluster: Cluster) -> list[str]:
    """How jobs ended that are there."""
    conditions = [(one.get("status") or {}).get("conditions") or () for one in cluster.store.list("Job")]
    return [one["type"] for job in conditions for one in job if one["type"] in ("Complete", "Failed")]


def names(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.store.list("Job")]


def found(state: ExecutionState) -> Any:
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return state.latest["work"].envelope["data"]


class Killed:
    """An execution whose driver is a process that can be killed."""

    def __init__(self, engine: Engine, settings: Settings, cluster: Cluster, out: Path) -> None:
        self._engine, self._out, self._said = engine, out, out.parent / "said.txt"
        self._variables = variables(settings, cluster)

    async def until_runs(self, count: int, more: str = "", command: str = SLOW) -> int:
        """Kills the driver while the container runs for the ``count``-th time; the execution's id."""
        workload = {"out": str(self._out), "command": command}
        created = await self._engine.lifecycle.create(of_step(more), workload)
        driver = drive(self._variables, created.id, self._said)
        try:
            await until(lambda: ran(self._out) == count or not driver.is_alive(), "a container")
            assert driver.is_alive(), self._said.read_text()
        finally:
            driver.kill()
            await asyncio.to_thread(driver.join)
        return created.id


@pytest.fixture
def killed(engine: Engine, settings: Settings, cluster: Cluster, out: Path) -> Killed:
    return Killed(engine, settings, cluster, out)


async def test_a_killed_drivers_job_is_waited_for(engine: Engine, cluster: Cluster, killed: Killed, out: Path) -> None:
    execution_id = await killed.until_runs(1)
    [job] = names(cluster)
    resumed = asyncio.create_task(engine.resume(execution_id))
    claims = "SELECT count(*) = 2 FROM noetl.event WHERE event_type = 'command.claimed'"
    await until(lambda: engine.runtime.pool.fetchval(claims), "the second claim")
    assert names(cluster) == [job]
    (out / "go").touch()
    data = found(await resumed)
    assert (data["job"], data["stdout"], data["exit_code"]) == (job, "the end\n", 0)
    assert ran(out) == 1
    assert not names(cluster)


async def test_a_job_that_ended_meanwhile_is_taken_as_it_ended_though_its_pod_is_gone(
    engine: Engine, cluster: Cluster, killed: Killed, out: Path
) -> None:
    execution_id = await killed.until_runs(1)
    (out / "go").touch()
    await until(lambda: ends(cluster) == ["Complete"])
    [pod] = cluster.pods()
    cluster.delete("Pod", pod["metadata"]["name"])
    await until(lambda: not cluster.pods())
    data = found(await engine.resume(execution_id))
    assert (data["stdout"], data["exit_code"]) == (None, 0)
    assert ran(out) == 1


async def test_a_retry_that_was_asked_for_is_another_job(
    engine: Engine, cluster: Cluster, killed: Killed, out: Path
) -> None:
    execution_id = await killed.until_runs(2, IN_ONE_COMMAND, FAILS_FIRST)
    (out / "go").touch()
    data = found(await engine.resume(execution_id))
    assert data["stdout"] == "the end\n"
    assert ran(out) == 2  # neither the failed one nor the other again
    assert not names(cluster)


async def test_a_job_that_took_too_long_is_over_before_its_command(engine: Engine, cluster: Cluster, out: Path) -> None:
    running = asyncio.create_task(engine.run(playbook(LIMITED), {"out": str(out)}))
    await until(lambda: ends(cluster) == ["Failed"] or running.done(), "the end of the job")
    assert not running.done(), (await running).error
    (out / "go").touch()
    assert found(await running) == "timeout"
    assert not names(cluster)


async def test_a_cancelled_execution_deletes_its_job(engine: Engine, cluster: Cluster, out: Path) -> None:
    running = asyncio.create_task(engine.run(of_step(), {"out": str(out), "command": SLOW}))
    await until(lambda: ran(out) == 1)
    [execution_id] = [
        row["execution_id"] for row in await engine.runtime.pool.fetch("SELECT DISTINCT execution_id FROM noetl.event")
    ]
    await engine.lifecycle.cancel(execution_id)
    assert (await running).status is ExecutionStatus.CANCELLED
    await until(lambda: not names(cluster) and not cluster.pods(), "the end of the job")


async def test_the_job_of_a_worker_that_is_stopped_is_waited_for_by_the_next(
    engine: Engine, settings: Settings, cluster: Cluster, start: StartProcess, out: Path
) -> None:
    own = settings.model_copy(update={"worker_drain_seconds": 0.2})
    first = start(
        [sys.executable, "-m", "noetl_dagster", "worker", "--id", "first"],
        env=variables(own, cluster),
        stdout=subprocess.PIPE,
        text=True,
    )
    running = asyncio.create_task(engine.run(of_step(dispatch="workers"), {"out": str(out), "command": SLOW}))
    await until(lambda: ran(out) == 1 or first.poll() is not None, "a container")
    assert first.poll() is None, first.communicate()[0]
    first.send_signal(signal.SIGTERM)
    await until(lambda: first.poll() is not None, "the worker's end")
    [job] = names(cluster)
    async with working(settings, "second"):
        again = "SELECT count(*) = 2 FROM noetl.event WHERE event_type = 'command.claimed'"
        await until(lambda: engine.runtime.pool.fetchval(again), "the second claim")
        (out / "go").touch()
        data = found(await running)
    assert (data["job"], data["stdout"]) == (job, "the end\n")
    assert ran(out) == 1
    await until(lambda: not names(cluster), "the deletion of the job")


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in the cluster."""
    namespace = tmp_path / "namespace"
    namespace.write_text("default")
    monkeypatch.setattr("noetl_dagster.tools.commands.cluster.NAMESPACE", namespace)


PARTITIONS = """
workload: {out: ""}
workflow:
  - step: work
    loop: {in: "{{ range(4) }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {granularity: partition, max_groups: 2, max_shard_retries: 0}}
    tool:
      kind: container
      image: busybox
      command: "echo once >> /out/ran; [ {{ n }} != 1 ] || while [ ! -e /out/go ]; do sleep 0.05; done"
      volumes: [{name: out, hostPath: {path: "{{ out }}"}}]
      volume_mounts: [{name: out, mountPath: /out}]
"""


@pytest.mark.usefixtures("inside")
async def test_jobs_of_a_partition_s_items_are_there_as_long_as_it(engine: Engine, cluster: Cluster, out: Path) -> None:
    """The second partition has ended, whose index is that of the item that runs in the first."""
    running = asyncio.create_task(engine.run(playbook(PARTITIONS), {"out": str(out)}))
    done = "SELECT count(*) > 0 FROM noetl.event WHERE event_type = 'loop.shard.done'"
    await until(lambda: engine.runtime.pool.fetchval(done), "a partition")
    await until(lambda: ran(out) == 4, "every item")
    await until(lambda: len(names(cluster)) == 2, "the jobs of the partition that has ended to go")
    assert (await engine.maintenance().run()).containers == 0
    (out / "go").touch()
    state = await running
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert ran(out) == 4
    await until(lambda: not names(cluster), "the others to go")


async def test_a_call_that_had_failed_without_a_job_does_not_run_beside_the_next(
    engine: Engine, cluster: Cluster, killed: Killed, out: Path
) -> None:
    refused: list[str] = []

    def away(method: str, path: str) -> Refused | None:
        if method != "POST" or not path.endswith("/jobs") or refused:
            return None
        refused.append(path)
        return Refused(503, "ServiceUnavailable", "away")

    with cluster.refusing(away):
        execution_id = await killed.until_runs(1, IN_ONE_COMMAND)
    assert refused
    [job] = names(cluster)
    (out / "go").touch()
    data = found(await engine.resume(execution_id))
    assert (data["job"], ran(out)) == (job, 1)
    await until(lambda: not names(cluster))


async def test_a_worker_that_was_taken_for_dead_makes_no_other_job(
    engine: Engine, settings: Settings, cluster: Cluster, start: StartProcess, out: Path
) -> None:
    first = start(
        [sys.executable, "-m", "noetl_dagster", "worker", "--id", "first"],
        env=variables(settings, cluster) | {"NOETL_LOG_LEVEL": "INFO"},
        stdout=(out.parent / "first.log").open("wb"),
    )
    workload = {"out": str(out), "command": SLOW}
    running = asyncio.create_task(engine.run(of_step(IN_ONE_COMMAND, "workers"), workload))
    await until(lambda: ran(out) == 1 or first.poll() is not None, "a container")
    first.send_signal(signal.SIGSTOP)
    async with working(settings, "second"):
        again = "SELECT count(*) = 2 FROM noetl.event WHERE event_type = 'command.claimed'"
        await until(lambda: engine.runtime.pool.fetchval(again), "the second claim")
        (out / "go").touch()
        found(await running)
        await until(lambda: not names(cluster), "the job to go")
        asked: list[str] = []

        def note(method: str, path: str) -> None:
            asked.append(path)

        with cluster.refusing(note):
            first.send_signal(signal.SIGCONT)
            await until(lambda: asked, "the first to look for its job")
            first.send_signal(signal.SIGTERM)
            await until(lambda: first.poll() is not None, (out.parent / "first.log").read_text())
    assert ran(out) == 1
    assert not names(cluster)


async def test_a_job_that_was_made_of_other_words_is_made_anew(box: ToolContext, log: NoLog, cluster: Cluster) -> None:
    old = cluster.create(job_manifest(call(command="sleep 1000")))
    assert (await tool_for("container").run(call(command="echo new"), box)).data["stdout"] == "new\n"
    await log.end()
    assert cluster.store.get("Job", "default", old["metadata"]["name"]) is None


async def test_a_cluster_that_takes_requests_and_does_not_answer(
    box: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_dagster.tools.commands.cluster.TIMES", (0.2, 0.2))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        here = {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": here}],
            "users": [{"name": "me", "user": {"token": "x"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        for module in (kubernetes.config, kubernetes.config.kube_config):
            monkeypatch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        with pytest.raises(ToolError, match="the Kubernetes API cannot be reached"):
            await asyncio.wait_for(tool_for("container").run(call(), box), PATIENCE_SECONDS)


async def test_a_job_that_could_not_be_ended_is_ended_when_the_cluster_is_back(
    engine: Engine, cluster: Cluster, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "UNANSWERED_SECONDS", 0.1)
    refused: list[str] = []

    def away(method: str, path: str) -> Refused:
        refused.append(f"{method} {path}")
        return Refused(503, "ServiceUnavailable", "away")

    running = asyncio.create_task(engine.run(of_step(), {"out": str(out), "command": SLOW}))
    await until(lambda: ran(out) == 1, "a container")
    with cluster.refusing(away):
        state = await running
        assert state.status is ExecutionStatus.FAILED
        assert "503" in str(state.error)
        [job] = names(cluster)
        count = len(refused)
        await until(lambda: len(refused) > count, "another try")
    await until(lambda: not names(cluster) and not cluster.pods(), f"the end of {job}")


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("everywhere", [True, False])
async def test_orphans_are_looked_for_where_the_process_may_look(
    engine: Engine, cluster: Cluster, out: Path, everywhere: bool
) -> None:
    (out / "go").touch()
    state = await engine.run(of_step(), {"out": str(out), "command": SLOW})
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
    for namespace in ("default", "other"):
        left = call()
        left.command_id = Command(state.execution_id, "work").command_id
        manifest = job_manifest(left)
        manifest["metadata"]["namespace"] = namespace
        cluster.create(manifest)

    def only_here(method: str, path: str) -> Refused | None:
        is_everywhere = path.split("?")[0].endswith("/apis/batch/v1/jobs")
        return Refused(403, "Forbidden", "jobs is forbidden") if is_everywhere and not everywhere else None

    with cluster.refusing(only_here):
        assert (await engine.maintenance().run()).containers == (2 if everywhere else 1)
    assert len(cluster.store.list("Job")) == (0 if everywhere else 1)


@pytest.mark.usefixtures("inside")
async def test_a_job_whose_driver_is_gone_ends_with_its_execution(
    engine: Engine, cluster: Cluster, killed: Killed
) -> None:
    other = cluster.create(job_manifest(call(command="sleep 1000")))
    execution_id = await killed.until_runs(1)
    await engine.maintenance().run()
    assert len(names(cluster)) == 2  # what may be resumed is nobody's orphan
    await engine.lifecycle.cancel(execution_id)
    assert names(cluster) == [other["metadata"]["name"]]


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("over", [True, False])
async def test_the_job_of_a_command_that_its_workers_lost_is_deleted(
    engine: Engine, cluster: Cluster, over: bool
) -> None:
    cluster.create(job_manifest(call(command="sleep 1000")))
    put = """
    INSERT INTO noetl.queue (execution_id, command_id, event_id, node_name, tool_kind, status, attempts, max_attempts,
                             lease_until, worker_id, context)
    VALUES (7, '7:stage:1:1', 1, 'stage', 'container', 'leased', 1, $1, now() - interval '1 s', 'w', $2)
    """
    context = own_context(Command(7, "stage")) | {"step": "stage"}
    await engine.runtime.pool.execute(put, 1 if over else 2, context)
    await engine.reaper().reap()
    assert len(names(cluster)) == (0 if over else 1)


async def test_a_job_of_the_same_name_that_is_anothers_is_left_alone(box: ToolContext, cluster: Cluster) -> None:
    manifest = job_manifest(call(command="sleep 1000"))
    manifest["metadata"]["annotations"] = {CALL: "8:other:1:1/task_0/1"}
    cluster.create(manifest)
    with pytest.raises(ToolError, match=r"has a job noetl-stage-\w+ that is not of this call; delete it"):
        await tool_for("container").run(call(), box)
    [job] = cluster.store.list("Job")
    assert "activeDeadlineSeconds" not in job["spec"]


async def test_a_job_that_is_being_deleted_is_no_answer(box: ToolContext, cluster: Cluster) -> None:
    manifest = job_manifest(call(command="echo old"))
    made = cluster.create(manifest)
    key = ("Job", "default", made["metadata"]["name"])
    await until(lambda: ends(cluster) == ["Complete"])
    cluster.store.update(key, lambda one: one["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    running = asyncio.create_task(tool_for("container").run(call(), box))
    refused: list[str] = []

    def note(method: str, path: str) -> None:
        refused.extend([path] * (method == "POST" and path.endswith("/jobs")))

    with cluster.refusing(note):
        await until(lambda: len(refused) > 2, "further tries")
        cluster.delete("Job", key[2])
        assert (await running).data["stdout"] == "new\n"


async def test_a_job_without_a_status_has_not_ended(run: Any, cluster: Cluster) -> None:
    """As it is between its creation and the first look of its controller."""
    looks: list[str] = []

    def drop(method: str, path: str) -> None:
        if path.endswith("/status") and len(looks) < 5:
            looks.append(path)
            cluster.store.update(("Job", "default", path.split("/")[-2]), lambda one: one.pop("status", None) and None)

    with cluster.refusing(drop):
        data = (await run("container", image="busybox", command="sleep 0.5; echo end")).data
    assert (data["stdout"], len(looks)) == ("end\n", 5)
