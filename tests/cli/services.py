"""Services of the command line as processes that a test starts, reads and ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

from tests import forked
from tests.cli.conftest import COMMAND
from tests.waiting import PATIENCE_SECONDS, until_now


class ServiceProcess:
    """``noetl-dagster <arguments>``; what it says is read as it comes."""

    def __init__(self, environment: dict[str, str], folder: Path, *arguments: str) -> None:
        self._process = forked.start(
            [*COMMAND, *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._said)

    @property
    def id(self) -> int:
        return self._process.pid

    def says(self, text: str) -> str:
        """Waits for a line with this text, and gives it."""

        def line() -> str:
            found = next((line for line in list(self._said) if text in line), "")
            assert found or self._process.poll() is None, f"it ended: {self.said}"
            return found

        return until_now(line, f"{text!r} in {self.said}").strip()

    def terminate(self) -> int:
        """Asks it to end; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
