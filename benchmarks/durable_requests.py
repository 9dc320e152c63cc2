"""What a durable request costs: fetching the pages of the main job, and the same pages with aiohttp alone.

    python -m benchmarks.durable_requests --patients 100 --turns 3

Both run in this process, on the embedded services, and ask the same records API with its faults. Prints milliseconds
of this process's CPU for each request, and their ratio. ``--profile`` prints where the time of the package goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks._patient_flow_by_hand import fetch
from benchmarks.fanout import database
from benchmarks.patient_flow import PLAYBOOK
from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.settings import Settings

SHOWN = 50


def fetching_part() -> Playbook:
    """The main job up to its last fetch."""
    playbook = yaml.safe_load(PLAYBOOK.read_text())
    playbook["workflow"] = [step for step in playbook["workflow"] if step["step"].startswith(("start", "fetch"))]
    for step in playbook["workflow"][1:]:
        del step["next"]
    return parse_playbook(yaml.safe_dump(playbook))


async def ours(engine: Engine, values: dict[str, Any]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    state = await engine.run(fetching_part(), values)
    spent = time.process_time() - began
    assert state.status is ExecutionStatus.COMPLETED, state.error
    return spent


async def by_hand(url: str, facilities: int, patients: int) -> tuple[float, int]:
    """CPU seconds of this process, and the number of requests."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        requests = await fetch(url, facilities, patients, Path(folder) / "pages")
        return time.process_time() - began, requests


async def measure(settings: Settings, url: str, arguments: argparse.Namespace) -> None:
    engine = await Engine.open(settings)
    size = {"facilities": arguments.facilities, "patients": arguments.patients}
    try:
        await ours(engine, {"facilities": 1, "patients": 4})
        for _ in range(arguments.turns):
            hand, requests = await by_hand(url, **size)
            profile = cProfile.Profile() if arguments.profile else None
            if profile is not None:
                profile.enable()
            own = await ours(engine, size | {"batch_size": 25})
            if profile is not None:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)
            print(
                f"{requests} requests: {own / requests * 1e3:.3f} ms of CPU each, by hand "
                f"{hand / requests * 1e3:.3f} ms; ratio {own / hand:.2f}",
                flush=True,
            )
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--facilities", type=int, default=10)
    parser.add_argument("--patients", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    settings = embedded.ensure(Settings(run_processes=1))
    environment = embedded.demo_environment(settings)
    os.environ |= environment
    with database(settings) as own:
        asyncio.run(measure(own, environment["NOETL_CREDENTIAL_RECORDS_API"], arguments))


if __name__ == "__main__":
    main()
