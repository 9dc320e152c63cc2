"""The main job at its price by hand: the patient flow, ours and a script of asyncio and PySpark, in one run.

    python -m benchmarks.patient_flow --sizes medium full --turns 2

Both fetch the same pages of the same records API, its faults included, and normalise and count them with the
same DataFrame code. The script keeps nothing that survives its process; ours writes every event, claim and result.
Each is a new process that a user would start, with a new JVM; the services run already. They go in turns, and
the best of each counts. Prints seconds of the whole, of fetching and of what follows it, CPU seconds of the
process and what it started, the peak of its memory, and the ratio of ours to the script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil

from noetl_dagster import embedded
from noetl_dagster.settings import Settings

PLAYBOOK = Path(__file__).parents[1] / "playbooks" / "patient_flow.yaml"
SIZES = {"small": (2, 20, 5), "medium": (5, 100, 10), "full": (10, 1000, 25)}
"""Facilities, patients a facility, patients of a shard."""

PHASES = """
SELECT extract(epoch FROM max(created_at) FILTER (WHERE node_name LIKE 'fetch%' AND event_type = 'step.exit')
                          - min(created_at)) AS fetch,
       extract(epoch FROM max(created_at) - min(created_at)) AS whole
FROM noetl.event WHERE execution_id = $1
"""


@dataclass(frozen=True)
class Measured:
    """Seconds of wall clock and CPU, and megabytes of the process that drives, at its peak."""

    seconds: float
    fetch: float
    after: float
    cpu: float
    megabytes: float
    records: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:7.1f} s  fetch {self.fetch:6.1f}  then {self.after:5.1f}  "
            f"cpu {self.cpu:6.1f}  {self.megabytes:5.0f} MB  {self.records:,} records"
        )


@dataclass(frozen=True)
class Ended:
    """A process that has ended: what it printed, and what it and its children took."""

    output: str
    seconds: float
    cpu: float
    megabytes: float


def watched(command: Sequence[str], environment: dict[str, str]) -> Ended:
    """Runs a command to its end.

    Raises:
        SystemExit: it failed; shows the tail of what it said.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=out, stderr=errors, start_new_session=True
        )
        own, peak, spent = psutil.Process(process.pid), 0, dict[int, float]()
        try:
            while process.poll() is None:
                with _gone_is_fine():
                    peak = max(peak, own.memory_info().rss)
                    spent |= _processor_seconds(own)
                time.sleep(0.1)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.perf_counter() - began
        out.seek(0)
        errors.seek(0)
        output = out.read()
        if process.returncode:
            raise SystemExit(f"{command}: exit code {process.returncode}\n{output}\n{errors.read()[-4000:]}")
    return Ended(output, seconds, sum(spent.values()), peak / 1024**2)


def _processor_seconds(own: psutil.Process) -> dict[int, float]:
    """Of a process and each below it. Nobody waits for a JVM's end, so its seconds are in no parent's account."""
    found = {}
    for process in (own, *own.children(recursive=True)):
        with _gone_is_fine():
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


class _gone_is_fine:  # noqa: N801, used like contextlib.suppress
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, psutil.Error)


def by_hand(url: str, size: tuple[int, int, int]) -> Measured:
    facilities, patients, _ = size
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "benchmarks._patient_flow_by_hand", url, "--folder", f"{folder}/pages"),
            *("--facilities", str(facilities), "--patients", str(patients)),
        ]
        ended = watched(command, {})
    found = json.loads(ended.output.splitlines()[-1])
    assert found["missing"] == 0, found
    after = ended.seconds - found["fetch_seconds"]
    return Measured(ended.seconds, found["fetch_seconds"], after, ended.cpu, ended.megabytes, found["records"])


def ours(settings: Settings, environment: dict[str, str], size: tuple[int, int, int]) -> Measured:
    values = dict(zip(("facilities", "patients", "batch_size"), size, strict=True))
    command = [sys.executable, "-m", "noetl_dagster", "run", str(PLAYBOOK), "--json"]
    for name, value in values.items():
        command += ["--set", f"{name}={value}"]
    ended = watched(command, environment)
    found = json.loads(ended.output)
    assert found["status"] == "COMPLETED", found
    fetch, records = asyncio.run(_phases(settings, int(found["execution_id"])))
    return Measured(ended.seconds, fetch, ended.seconds - fetch, ended.cpu, ended.megabytes, records)


async def _phases(settings: Settings, execution_id: int) -> tuple[float, int]:
    """Seconds from the first event to the last fetch's end, and records that the playbook counted."""
    connection = await asyncpg.connect(settings.db_url)
    try:
        row = await connection.fetchrow(PHASES, execution_id)
        records = await connection.fetchval(
            "SELECT sum(records) FROM patient_flow.validation WHERE execution_id = $1", execution_id
        )
        return float(row["fetch"]), int(records)
    finally:
        await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["medium"])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "by-hand"])
    arguments = parser.parse_args()
    settings = embedded.ensure(Settings())
    environment = embedded.environment(settings) | embedded.demo_environment(settings)
    url = environment["NOETL_CREDENTIAL_RECORDS_API"]
    print(f"{os.cpu_count()} cores")
    for name in arguments.sizes:
        size, best = SIZES[name], dict[str, Measured]()
        for _ in range(arguments.turns):
            for who in ("by-hand", "ours"):
                if arguments.only in (None, who):
                    found = by_hand(url, size) if who == "by-hand" else ours(settings, environment, size)
                    print(f"{name:>8} {who:>8} {found}", flush=True)
                    best[who] = min(best.get(who, found), found, key=lambda one: one.seconds)
        if len(best) == 2:
            hand, our = best["by-hand"], best["ours"]
            assert hand.records == our.records, (hand.records, our.records)
            print(f"{name:>8} ours / by hand: {our.seconds / hand.seconds:.2f}, fetch {our.fetch / hand.fetch:.2f}")


if __name__ == "__main__":
    main()
