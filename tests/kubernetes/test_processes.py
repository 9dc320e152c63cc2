"""Every process that the chart starts: it becomes ready, lives, drains, and nothing is lost when it is killed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.helm.chart import component, manifests, pods_of
from tests.kubernetes.processes import Machine, secrets_for, values_for
from tests.ledger import lines
from tests.playbooks import playbook
from tests.processes import killed_in_the_end
from tests.waiting import PATIENCE_SECONDS, PROCESS_SECONDS, until, until_now
from tests.whole import FAN

OURS = ("api", "ingest", "worker-default", "worker-gpu")
DAGSTERS = ("code-location", "webserver", "daemon")
ITEMS, HELD = 300, 3


@pytest.fixture
def machine(settings: Settings, tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    objects = manifests(values_for(settings))
    started = {pods.component for pods in pods_of(objects) if pods.kind in ("Deployment", "StatefulSet")}
    assert started == {*OURS, *DAGSTERS}, "processes that nobody tries"
    with killed_in_the_end() as start:
        yield Machine(objects, secrets_for(settings), folder, start)


def becomes_ready(machine: Machine, name: str) -> None:
    until_now(lambda: machine.probe(name, "readiness"), f"{name} to be ready: {machine.log(name)[-2000:]}")
    assert machine.probe(name, "liveness"), name


async def test_our_processes_are_killed_in_the_middle(machine: Machine, settings: Settings, tmp_path: Path) -> None:
    provision = machine.start("provision")
    assert await asyncio.to_thread(provision.wait, PROCESS_SECONDS) == 0, machine.log("provision")
    running = {name: machine.start(name) for name in OURS}
    for name in OURS:
        await asyncio.to_thread(becomes_ready, machine, name)

    ledger = tmp_path / "ledger"
    engine = await Engine.open(settings.model_copy(update={"worker_heartbeat_seconds": 0.5}))
    workload = {"ledger": str(ledger), "items": ITEMS, "held": HELD}
    driving = asyncio.create_task(engine.run(playbook(FAN), workload))
    await until(lambda: ledger.exists() and len(lines(ledger)) > ITEMS // 10, "commands that run")
    for name in ("worker-default", "ingest", "api"):
        running[name].send_signal(signal.SIGKILL)
        running[name].wait()
    for name in ("worker-default", "ingest", "api"):
        running[name] = machine.start(name)
    for name in OURS:
        await asyncio.to_thread(becomes_ready, machine, name)
    await asyncio.to_thread(Path(f"{ledger}.go").touch)
    state = await asyncio.wait_for(driving, PROCESS_SECONDS)
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert {int(line[0]) for line in lines(ledger)} == set(range(ITEMS))
    found = await engine.runtime.pool.fetchval(
        "SELECT result FROM noetl.event WHERE node_name = 'total' AND event_type = 'command.completed'"
    )
    assert str([ITEMS, sum(range(ITEMS))]) in str(found)
    await engine.close()

    for process in running.values():
        process.send_signal(signal.SIGTERM)
    for name, process in running.items():
        grace = component(machine.objects, name).spec["terminationGracePeriodSeconds"]
        begun = time.monotonic()
        code = await asyncio.to_thread(process.wait, grace)
        assert code == 0, (name, machine.log(name)[-2000:])
        assert time.monotonic() - begun < max(grace, PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAGSTERS)
def test_dagsters_processes_come_back(machine: Machine, name: str) -> None:
    provision = machine.start("provision")
    assert provision.wait(PROCESS_SECONDS) == 0, machine.log("provision")
    if name != "code-location":
        machine.start("code-location")
        becomes_ready(machine, "code-location")
    process = machine.start(name)
    until_now(lambda: machine.probe(name, "readiness"), name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until_now(lambda: not machine.probe(name, "readiness"), name)
    machine.start(name)
    until_now(lambda: machine.probe(name, "readiness"), name)
    assert machine.probe(name, "liveness")
