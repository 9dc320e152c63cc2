"""``daemon``: Dagster's daemon, which reports its health over HTTP."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from noetl_dagster.cli.health import Health, listening
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings, get_settings

BEAT_SECONDS = 30.0
"""How often the daemon's threads store a heartbeat, and how often these are read here."""

SILENT_SECONDS = 1800.0
"""Dagster's own tolerance: a thread without a heartbeat for this long is stuck."""


class DaemonHealth(Health):
    """The health of the daemon, by the heartbeats of its threads.

    While Dagster's storage does not answer, no thread can store a heartbeat, so silence begins anew when it answers.

    Args:
        instance: an instance of Dagster.
    """

    def __init__(self, settings: Settings, instance: Any) -> None:
        super().__init__(settings)
        self._instance = instance
        self._since = time.time()
        self._silent: str | None = None

    def stuck(self) -> str | None:
        """Returns which threads are silent, None if there are none."""
        return self._silent

    def unready(self) -> str | None:
        """Returns why heartbeats cannot be read, None if they can."""
        return self._unready

    def read(self) -> None:
        """Reads the heartbeats."""
        try:
            found = self._instance.get_daemon_heartbeats()
        except Exception as error:  # whatever the storage raises: the daemon goes on, and so does this
            self._since = time.time()
            self._silent, self._unready = None, f"Dagster's storage does not answer: {type(error).__name__}"
            return
        self._unready = None
        silent = [
            name
            for name in self._instance.get_required_daemon_types()
            if time.time() - max(found[name].timestamp if name in found else 0, self._since) > SILENT_SECONDS
        ]
        self._silent = f"no heartbeat for {SILENT_SECONDS:.0f} s from {', '.join(silent)}" if silent else None

    def follow(self) -> None:
        """Reads the heartbeats until the process ends."""
        while True:
            self.read()
            time.sleep(BEAT_SECONDS)


def daemon(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="workspace file of Dagster")] = Path(
        "workspace.yaml"
    ),
) -> None:
    """Run Dagster's daemon, and report its health on NOETL_HEALTH_PORT."""
    from dagster import DagsterInstance  # takes long to import

    from noetl_dagster.dagster_internals import run_command

    settings = get_settings()
    with DagsterInstance.get() as instance:
        if settings.health_port is not None:
            health = DaemonHealth(settings, instance)
            server = listening(settings.health_host, settings.health_port, health, Metrics())
            for work in (server.serve_forever, health.follow):
                threading.Thread(target=work, name="noetl-health", daemon=True).start()
            typer.echo(f"health on {server.url}")
        run_command.main(["-w", str(workspace)], standalone_mode=False)
