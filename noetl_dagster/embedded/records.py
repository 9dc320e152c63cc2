"""The made-up clinical records API as a managed service, for demonstrations and tests."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from noetl_dagster.embedded.processes import LOOPBACK, Launch
from noetl_dagster.embedded.service import Ports
from noetl_dagster.embedded.state import ServiceName
from noetl_dagster.settings import Settings


class RecordsApi:
    """``python -m noetl_dagster.embedded.records_api``; one that runs already keeps its seed and share of faults."""

    name = ServiceName.RECORDS_API
    listeners: tuple[str, ...] = ("http",)
    front = "http"
    stop_signal = signal.SIGTERM
    start_patience = 30.0
    stop_patience = 5.0

    def __init__(self, settings: Settings) -> None:
        self.fixed_port = settings.records_api_port
        self._seed = settings.records_api_seed
        self._faults = settings.records_api_faults

    def prepare(self, folder: Path, ports: Ports) -> Launch:
        options = {"--port": ports["http"], "--seed": self._seed, "--faults": self._faults}
        arguments = [text for name, value in options.items() for text in (name, str(value))]
        return Launch([sys.executable, "-m", "noetl_dagster.embedded.records_api", *arguments])

    def ready(self, ports: Ports) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url(ports)}/health", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def furnish(self, ports: Ports) -> None:
        """It computes its records; nothing is loaded."""

    def url(self, ports: Ports) -> str:
        return f"http://{LOOPBACK}:{ports['http']}"
