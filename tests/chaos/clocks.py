"""Clocks of single processes, which faults move: libfaketime, in the process from which all others are forked."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

LIBRARY = "vendor/libfaketime/src/libfaketime.so.1"
OPTIONS = {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1"}
FILE = "FAKETIME_TIMESTAMP_FILE"
RIGHT = "+0"


def load() -> None:
    """Has the process that forks load the library; called before the first process is forked."""
    found = importlib.util.find_spec("libfaketime")
    if found is not None and found.origin is not None and (library := Path(found.origin).parent / LIBRARY).exists():
        os.environ |= {"LD_PRELOAD": str(library), **OPTIONS}


class Clocks:
    """The clocks of a machine: a file for each name, which the library reads every second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved: set[str] = set()

    def environment(self, name: str) -> dict[str, str]:
        """Variables of a process with this clock."""
        if "LD_PRELOAD" not in os.environ:
            return {}
        if not self._file(name).exists():
            self._file(name).write_text(RIGHT)
        return {**OPTIONS, FILE: str(self._file(name))}

    def move(self, name: str, seconds: int) -> bool:
        """Moves a clock; False if there are none."""
        if "LD_PRELOAD" not in os.environ:
            return False
        self._file(name).write_text(f"{seconds:+d}")
        self._moved.add(name)
        return True

    def set_right(self) -> None:
        for name in self._moved:
            self._file(name).write_text(RIGHT)
        self._moved.clear()

    def _file(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '_')}.clock"
