"""What a program imports, and who asked for it: read from Python's own account, ``-X importtime``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PROCESS_SECONDS

_LINE = re.compile(r"import time:\s+\d+ \|\s+\d+ \| (?P<indent> *)(?P<module>\S+)$")


@dataclass(frozen=True, slots=True)
class Imported:
    """Modules that a program imported, each with the modules that were being imported around it, outermost first."""

    program: str
    chains: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, program: str, account: str) -> Imported:
        """Reads what ``-X importtime`` wrote: a module stands below those that it imported."""
        lines = [found for line in account.splitlines() if (found := _LINE.search(line)) is not None]
        chains: dict[str, tuple[str, ...]] = {}
        around: list[str] = []
        for line in reversed(lines):
            del around[len(line["indent"]) // 2 :]
            chains.setdefault(line["module"], tuple(around))
            around.append(line["module"])
        return cls(program, chains)

    def refuse(self, packages: Collection[str]) -> None:
        """Fails for every package of the list that was imported, with the way that led to it."""
        led = {
            package: self._way_to(module) for package in packages for module in list(self.chains) if module == package
        }
        assert not led, f"{self.program} imports what it has no use for:\n" + "\n".join(
            f"  {package}: {way}" for package, way in sorted(led.items())
        )

    def _way_to(self, module: str) -> str:
        """Who imported a module: our own modules on the way to it, and the last step."""
        chain = self.chains[module]
        ours = [one for one in chain if one.startswith("noetl_dagster")]
        last = [one for one in chain[-1:] if one not in ours]
        return " > ".join([*ours, *last, module])


def imported(arguments: list[str], environment: Mapping[str, str], folder: Path) -> Imported:
    """Runs a Python program to its end.

    Args:
        arguments: of the interpreter: ``["-m", "noetl_dagster", "status", "1"]``.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env=dict(environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr[-3000:]}"
    return Imported.read(" ".join(arguments), done.stderr)
