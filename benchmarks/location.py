"""How long a code location of many playbooks takes to load, beside as many graph-backed assets in plain Dagster.

Cold processes, as a user meets them: the definitions alone, and Dagster's code server until it answers.

python benchmarks/location.py [repeats] [playbooks...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks._many_playbooks import write_by_hand, write_playbooks
from benchmarks._processes import Cost, ended, until_line

REPEATS = 3
SIZES = (100, 300, 1_000)
GOALS = {100: 3.0, 1_000: 10.0}
"""Seconds that the definitions of so many playbooks may take beyond ``import dagster``."""

OURS, BY_HAND = "noetl_dagster.definitions", "by_hand"
READY = "Started Dagster code server"


def main(repeats: int, sizes: tuple[int, ...]) -> None:
    """Everything in turn, ``repeats`` times; the least of each counts, for the machine is not ours alone."""
    print("seconds, those of the processor in brackets; the ratio is ours to plain Dagster, of processor time")
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="noetl-bench-") as name:
            folder = Path(name)
            write_playbooks(folder / "playbooks", size)
            write_by_hand(folder, size)
            best = _measured(folder, repeats)
        base = best["import dagster"]
        ours, plain = best[f"import {OURS}"], best[f"import {BY_HAND}"]
        goal = f", goal {GOALS[size]:g}" if size in GOALS else ""
        print(f"{size} playbooks: import dagster {base.wall:.2f} ({base.cpu:.2f})")
        print(
            f"  definitions, beyond that: {_beyond(ours, base)}{goal}; plain Dagster {_beyond(plain, base)}; "
            f"ratio {(ours.cpu - base.cpu) / (plain.cpu - base.cpu):.2f}"
        )
        ours, plain = best[f"server {OURS}"], best[f"server {BY_HAND}"]
        print(
            f"  code server until it answers: {ours.wall:.2f} ({ours.cpu:.2f}); plain Dagster {plain.wall:.2f} "
            f"({plain.cpu:.2f}); ratio {ours.cpu / plain.cpu:.2f}",
            flush=True,
        )


def _measured(folder: Path, repeats: int) -> dict[str, Cost]:
    environment = _environment(folder)
    best: dict[str, Cost] = {}
    for _ in range(repeats + 1):
        costs = {"import dagster": ended(["-c", "import dagster"], environment, folder)}
        for module in (OURS, BY_HAND):
            costs[f"import {module}"] = ended(["-c", f"import {module}"], environment, folder)
            server = ["-m", "dagster", "api", "grpc", "-m", module, "--socket", str(folder / "socket")]
            costs[f"server {module}"] = until_line(server, READY, environment, folder)
        if not best:  # the first makes bytecode
            best = costs
        best = {case: cost.least(best[case]) for case, cost in costs.items()}
    return best


def _beyond(cost: Cost, base: Cost) -> str:
    return f"{cost.wall - base.wall:.2f} ({cost.cpu - base.cpu:.2f})"


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    (folder / "home").mkdir()
    return {
        **inherited,
        "DAGSTER_HOME": str(folder / "home"),
        "NOETL_HOME": str(folder / "home"),
        "NOETL_PLAYBOOKS_PATH": str(folder / "playbooks"),
        "PYTHONPATH": os.pathsep.join([str(folder), inherited.get("PYTHONPATH", "")]),
    }


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[1:]]
    main(numbers[0] if numbers else REPEATS, tuple(numbers[1:]) or SIZES)
