"""How long commands take to start, beside ``import dagster``. Prints seconds, processor seconds and ratios.

python benchmarks/start.py [repeats]
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._two_steps import PLAYBOOK
from noetl_dagster import embedded
from noetl_dagster.launcher.address import stop
from noetl_dagster.settings import Settings

REPEATS = 5
NOETL = ("-m", "noetl_dagster")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process: seconds until it was done, and seconds of processor time."""

    wall: float
    cpu: float


Measured = Callable[[], Cost]


def main(repeats: int) -> None:
    """Everything in turn, ``repeats`` times; the least of each counts, for the machine is not ours alone."""
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as name:
        folder = Path(name)
        (folder / "two.yaml").write_text(PLAYBOOK)
        environment = _environment(folder)
        _ended(["-m", "noetl_dagster", "run", "two.yaml"], environment, folder)  # makes tables and bytecode
        listed = _output([*NOETL, "executions", "--json"], environment, folder)
        execution = re.findall(r'"execution_id": "(\d+)"', listed)[0]
        cases: dict[str, Measured] = {
            "import dagster": lambda: _ended(["-c", "import dagster"], environment, folder),
            "import dagster, dagster_postgres": lambda: _ended(
                ["-c", "import dagster, dagster_postgres.storage"], environment, folder
            ),
            "check": lambda: _ended([*NOETL, "check", "two.yaml"], environment, folder),
            "status": lambda: _ended([*NOETL, "status", execution], environment, folder),
            "events": lambda: _ended([*NOETL, "events", execution], environment, folder),
            "worker, until it works": lambda: _until_line([*NOETL, "worker"], "slots", environment, folder),
            "code location": lambda: _ended(["-c", "import noetl_dagster.definitions"], environment, folder),
            "run of two python steps, NOETL_WARM_COMMANDS": lambda: _ended(
                [*NOETL, "run", "two.yaml"], {**environment, "NOETL_WARM_COMMANDS": "true"}, folder
            ),
            "run of two python steps": lambda: _ended([*NOETL, "run", "two.yaml"], environment, folder),
        }
        best: dict[str, Cost] = {}
        for _ in range(repeats):
            for case, measured in cases.items():
                cost = measured()
                known = best.get(case, cost)
                best[case] = Cost(min(known.wall, cost.wall), min(known.cpu, cost.cpu))
        stop(folder / "home" / "runs")
        embedded.down(Settings(home=folder / "home"))
    base = best["import dagster"]
    print(f"{'':46}     wall      cpu   of import dagster")
    for case, cost in best.items():
        ratios = f"{cost.wall / base.wall:5.2f} {cost.cpu / base.cpu:5.2f}"
        print(f"{case:46} {cost.wall:6.2f} s {cost.cpu:6.2f} s   {ratios}")


def _environment(folder: Path) -> dict[str, str]:
    settings = embedded.ensure(Settings(home=folder / "home", playbooks_path=folder))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    inherited.pop("DAGSTER_HOME", None)
    return {**inherited, **embedded.environment(settings)}


def _ended(arguments: list[str], environment: dict[str, str], folder: Path) -> Cost:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _output(arguments, environment, folder)
    return _since(before, began)


def _until_line(arguments: list[str], text: str, environment: dict[str, str], folder: Path) -> Cost:
    """Until a service says that it is ready; its processor time includes its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, f"{arguments} ended before it was ready"
    wall = time.perf_counter() - began
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return Cost(wall, _since(before, began).cpu)


def _output(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout


def _since(before: resource.struct_rusage, began: float) -> Cost:
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - began, cpu)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS)
