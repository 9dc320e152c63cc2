"""Executions a second of a playbook of two python steps: warm processes beside Dagster's default launcher.

They have a Dagster run each, or none. The CPU time is that of each kind of process.

python benchmarks/executions.py [executions] [of the default launcher] [without a run]
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import httpx
import psutil
import yaml

from benchmarks._two_steps import PLAYBOOK
from noetl_dagster import embedded
from noetl_dagster.events.transport.wire import CLIENT_HEADER
from noetl_dagster.launcher.address import stop
from noetl_dagster.settings import Settings

EXECUTIONS = 1000
DEFAULT = 12
WITHOUT_RUN = 3000
ALONE = 20
FIRST_STEP = """
SELECT extract(epoch FROM min(created_at))::float8 FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.enter'
"""
REPORTED = "SELECT count(*) FROM noetl.event WHERE event_type = 'execution.reported' AND execution_id = ANY($1)"
ENDED = "SELECT count(*) FROM noetl.event WHERE event_type = 'playbook.completed' AND execution_id = ANY($1)"

LAUNCH = """
import sys, time, uuid
from dagster import DagsterInstance
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget
count = int(sys.argv[1])
target = ModuleTarget("noetl_dagster.definitions", None, str(sys.argv[2]), "noetl_dagster.definitions")
with DagsterInstance.get() as instance, WorkspaceProcessContext(instance, target) as process:
    context = process.create_request_context()
    location = context.get_code_location("noetl_dagster.definitions")
    [name] = [one.name for one in location.get_repositories().values()]
    job = location.get_repository(name).get_full_job("two")
    def run():
        plan = location.get_execution_plan(job, {}, step_keys_to_execute=None, known_state=None)
        return instance.create_run(
            job_name="two", run_id=str(uuid.uuid4()), run_config={}, resolved_op_selection=None,
            step_keys_to_execute=None, status=None, tags={}, root_run_id=None, parent_run_id=None,
            job_snapshot=job.job_snapshot, execution_plan_snapshot=plan.execution_plan_snapshot,
            parent_job_snapshot=job.parent_job_snapshot, remote_job_origin=job.get_remote_origin(),
            job_code_origin=job.get_python_origin(), asset_selection=None, asset_check_selection=None,
            op_selection=None, asset_graph=location.get_repository(name).asset_graph)
    began = time.perf_counter()
    for _ in range(count):
        instance.launch_run(run().run_id, context)
    print("launched", time.perf_counter() - began, flush=True)
    while instance.get_runs_count() and any(not one.is_finished for one in instance.get_runs()):
        time.sleep(0.2)
    assert all(one.status.value == "SUCCESS" for one in instance.get_runs())
    print("seconds", time.perf_counter() - began)
"""


async def main(executions: int, default: int, without_run: int) -> None:
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as name:
        folder = Path(name)
        (folder / "two.yaml").write_text(PLAYBOOK)
        settings = embedded.ensure(Settings(home=folder / "home", playbooks_path=folder))
        try:
            plain = _plainly(settings, default) if default else 0.0
            if default:
                print(f"Dagster's default launcher: {default} runs in {plain:.1f} s, {default / plain:.2f} a second")
            with serving(settings) as url:
                rate = await _ours(settings, url, executions) if executions else 0.0
                if without_run:
                    await _without_run(settings, url, without_run)
            if default and executions:
                print(f"{rate / (default / plain):.1f} times Dagster's default launcher")
        finally:
            stop(embedded.run_server_folder(settings))
            embedded.down(settings)


async def _ours(settings: Settings, url: str, executions: int) -> float:
    assert settings.db_url is not None
    connection = await asyncpg.connect(settings.db_url)
    limits, headers = httpx.Limits(max_connections=64), {CLIENT_HEADER: "benchmark"}
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers) as client:
        await _ended(connection, [await _post(client) for _ in range(3)])  # the server has come up
        waits = []
        for _ in range(ALONE):
            at = time.time()
            execution = await _post(client)
            await _ended(connection, [execution])
            waits.append(1000 * (await connection.fetchval(FIRST_STEP, execution) - at))
        print(
            f"idle: POST to the first step's event p50 {statistics.median(waits):.0f} ms, "
            f"the slowest of {ALONE} {max(waits):.0f} ms"
        )
        before, began = _cpu(settings), time.perf_counter()
        posted = await asyncio.gather(*(_post(client) for _ in range(executions)))
        accepted = time.perf_counter() - began
        peak = await _ended(connection, posted, settings)
        seconds = time.perf_counter() - began
        cpu = _cpu_of_each(settings, before, executions)
    await connection.close()
    print(
        f"{executions} POSTed at once: accepted in {accepted:.1f} s, all completed in {seconds:.1f} s, "
        f"{executions / seconds:.1f} a second; {peak / 1024**2:.0f} MB in all run processes at most"
    )
    print(cpu)
    return executions / seconds


async def _without_run(settings: Settings, url: str, executions: int) -> None:
    """Posts executions at once from a process of its own, and waits until Dagster has their assets."""
    assert settings.db_url is not None
    connection = await asyncpg.connect(settings.db_url)
    headers = {CLIENT_HEADER: "benchmark"}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:
        await _ended(connection, [await _post(client, "engine") for _ in range(3)], query=REPORTED)
    before, began = _cpu(settings), time.perf_counter()
    posted = await _post_many(url, executions)
    accepted = time.perf_counter() - began
    await _ended(connection, posted)
    seconds = time.perf_counter() - began
    await _ended(connection, posted, query=REPORTED)
    reported = time.perf_counter() - began
    cpu = _cpu_of_each(settings, before, executions)
    await connection.close()
    print(
        f"without a run: {executions} POSTed at once: accepted in {accepted:.1f} s, all completed in {seconds:.1f} s, "
        f"{executions / seconds:.0f} a second; Dagster had all assets after {reported:.1f} s, "
        f"{executions / reported:.0f} a second"
    )
    print(cpu)


async def _post_many(url: str, count: int) -> list[int]:
    """Posts over 64 connections with aiohttp, which needs less CPU time than httpx."""
    left = iter(range(count))
    posted: list[int] = []
    body = {"path": "bench/two", "runner": "engine"}
    async with aiohttp.ClientSession(url, headers={CLIENT_HEADER: "benchmark"}) as session:

        async def post() -> None:
            for _ in left:
                async with session.post("/api/executions/execute", json=body) as answer:
                    answer.raise_for_status()
                    posted.append(int((await answer.json())["execution_id"]))

        await asyncio.gather(*(post() for _ in range(64)))
    return posted


def _cpu_of_each(settings: Settings, before: dict[str, float], executions: int) -> str:
    cpu = {kind: 1000 * (now - before.get(kind, 0.0)) / executions for kind, now in _cpu(settings).items()}
    return "CPU time of each in ms: " + ", ".join(f"{kind} {used:.1f}" for kind, used in sorted(cpu.items()))


def _cpu(settings: Settings) -> dict[str, float]:
    """Seconds of CPU time by kind of process, with that of their children that have ended."""
    found: dict[str, float] = {"this benchmark": time.process_time()}
    home, database = str(settings.home.resolve()), set()
    for process in psutil.process_iter(["name", "cmdline"]):
        try:
            line = process.info["cmdline"] or []
            ours = any(home in word for word in line)
            if ours and "postgres" in process.info["name"]:
                database.add(process.pid)
            if "noetl_dagster.launcher.server" in line and ours:
                kind = "run server and drivers"
            elif "serve" in line and process.ppid() == os.getpid():
                kind = "API"
            elif process.pid in database or process.ppid() in database:
                kind = "PostgreSQL"
            else:
                continue
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[kind] = found.get(kind, 0.0) + sum(times[:4])
    return found


async def _post(client: httpx.AsyncClient, runner: str = "dagster") -> int:
    answer = await client.post("/api/executions/execute", json={"path": "bench/two", "runner": runner})
    return int(answer.raise_for_status().json()["execution_id"])


async def _ended(connection: Any, executions: list[int], settings: Settings | None = None, query: str = ENDED) -> int:
    """Waits for executions to complete; the most memory of the run processes meanwhile, in bytes."""
    peak = 0
    while await connection.fetchval(query, executions) < len(executions):
        await asyncio.sleep(0.01 if len(executions) < 10 else 1.0 if settings is not None else 0.2)
        if settings is not None:
            peak = max(peak, _memory())
    return peak


def _memory() -> int:
    """Proportional memory of the processes that drive runs: what they share counts once."""
    total = 0
    for process in psutil.process_iter(["cmdline"]):
        if "noetl_dagster.launcher.server" in (process.info["cmdline"] or []):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    return total


def _plainly(settings: Settings, count: int) -> float:
    """The same job launched by Dagster's default launcher; seconds until all runs have ended."""
    home = embedded.dagster_home(settings)
    config = yaml.safe_load((home / "dagster.yaml").read_text())
    plain = home.parent / "plain"
    plain.mkdir()
    config["run_launcher"] = {"module": "dagster", "class": "DefaultRunLauncher"}
    del config["compute_logs"]
    (plain / "dagster.yaml").write_text(yaml.safe_dump(config))
    said = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(count), str(Path.cwd())],
        env={**os.environ, **embedded.environment(settings), "DAGSTER_HOME": str(plain)},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    [seconds] = re.findall(r"^seconds ([\d.]+)$", said, re.MULTILINE)
    return float(seconds)


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "noetl_dagster", "serve", "--port", "0"],
        env={**os.environ, **embedded.environment(settings)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"serve ended with {process.wait()}", file=sys.stderr)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    asyncio.run(main(*(given + [EXECUTIONS, DEFAULT, WITHOUT_RUN][len(given) :])))
