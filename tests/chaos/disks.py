"""Small file systems, which faults fill."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

MEBIBYTE = 1024**2
SIZES = {"postgres": 700, "nats": 64, "pvc": 64}
"""Mebibytes of the file systems, by their folders in the state folder."""

FILLER = "filler"


class Disks:
    """File systems in memory at folders of a state folder. Mounting takes root; without it, there are none."""

    def __init__(self, home: Path) -> None:
        self._mounted: dict[str, Path] = {}
        for name, size in SIZES.items():
            folder = home / name
            folder.mkdir(mode=0o700, parents=True)
            options = f"size={size}m,mode=0700"
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                reason = done.stderr.strip()
                print(f"no disk of {name} is filled, since a small one cannot be mounted: {reason}", file=sys.stderr)
                continue
            self._mounted[name] = folder

    def fill(self, name: str) -> bool:
        """Leaves no byte; False if it is not mounted."""
        if name not in self._mounted:
            return False
        with (self._mounted[name] / FILLER).open("ab") as filler:
            for piece in (MEBIBYTE, 4096):
                with suppress(OSError):
                    while True:
                        _extend(filler.fileno(), piece)
        return True

    def free(self) -> None:
        for folder in self._mounted.values():
            (folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        for folder in self._mounted.values():
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _extend(descriptor: int, size: int) -> None:
    os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
