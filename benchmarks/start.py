"""How long commands take to start, beside ``import dagster``. Prints seconds, processor seconds and ratios.

python benchmarks/start.py [repeats]
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks._processes import Cost, ended, output, until_line
from benchmarks._two_steps import PLAYBOOK
from noetl_dagster import embedded
from noetl_dagster.settings import Settings

REPEATS = 5
NOETL = ("-m", "noetl_dagster")


Measured = Callable[[], Cost]


def main(repeats: int) -> None:
    """Everything in turn, ``repeats`` times; the least of each counts, for the machine is not ours alone."""
    with tempfile.TemporaryDirectory(prefix="noetl-bench-") as name:
        folder = Path(name)
        (folder / "two.yaml").write_text(PLAYBOOK)
        environment = _environment(folder)
        ended(["-m", "noetl_dagster", "run", "two.yaml"], environment, folder)  # makes tables and bytecode
        listed = output([*NOETL, "executions", "--json"], environment, folder)
        execution = re.findall(r'"execution_id": "(\d+)"', listed)[0]
        cases: dict[str, Measured] = {
            "import dagster": lambda: ended(["-c", "import dagster"], environment, folder),
            "import dagster, dagster_postgres": lambda: ended(
                ["-c", "import dagster, dagster_postgres.storage"], environment, folder
            ),
            "check": lambda: ended([*NOETL, "check", "two.yaml"], environment, folder),
            "status": lambda: ended([*NOETL, "status", execution], environment, folder),
            "events": lambda: ended([*NOETL, "events", execution], environment, folder),
            "worker, until it works": lambda: until_line([*NOETL, "worker"], "slots", environment, folder),
            "code location": lambda: ended(["-c", "import noetl_dagster.definitions"], environment, folder),
            "run of two python steps": lambda: ended([*NOETL, "run", "two.yaml"], environment, folder),
        }
        best: dict[str, Cost] = {}
        for _ in range(repeats):
            for case, measured in cases.items():
                cost = measured()
                best[case] = cost.least(best.get(case, cost))
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


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS)
