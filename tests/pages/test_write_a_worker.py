"""The worker of the guide works as it is written."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.pages.console import Reader

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-worker.md"


def test_the_worker_of_the_guide(reader: Reader) -> None:
    try:
        assert reader.follow(PAGE) == 4
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((reader.folder / "worker.pid").read_text()), signal.SIGKILL)
