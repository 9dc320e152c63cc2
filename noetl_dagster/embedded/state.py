"""The state folder: a record of each service, and the lock that serialises starts."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from noetl_dagster.errors import ServiceError


class ServiceName(StrEnum):
    """The embedded services."""

    POSTGRES = "postgres"
    NATS = "nats"
    OBJECT_STORE = "object_store"
    RECORDS_API = "records_api"


class ServiceRecord(BaseModel):
    """The record of one service. Ports are kept when it stops, so that URLs stay the same."""

    model_config = ConfigDict(frozen=True)

    ports: dict[str, int] = Field(description="Port of each listener, on 127.0.0.1")
    pid: int | None = Field(None, description="Main process; None: stopped on purpose")
    started: str = Field("", description="The process' start mark, see processes.start_mark")
    ready: bool = Field(False, description="Whether it was seen to serve since it started")
    url: str = Field("", description="Where clients connect")


class ServicesFile(BaseModel):
    """The file ``services.json`` in the state folder."""

    model_config = ConfigDict(frozen=True)

    services: dict[ServiceName, ServiceRecord] = Field(default_factory=dict)

    def with_record(self, name: ServiceName, record: ServiceRecord) -> ServicesFile:
        """Returns a copy with another record for one service."""
        return ServicesFile(services={**self.services, name: record})

    def taken_ports(self) -> set[int]:
        """Returns the ports of all services."""
        return {port for record in self.services.values() for port in record.ports.values()}


def read_state(home: Path) -> ServicesFile:
    """Reads the file; an absent file is empty."""
    path = home / "services.json"
    if not path.exists():
        return ServicesFile()
    return ServicesFile.model_validate_json(path.read_bytes())


def write_state(home: Path, state: ServicesFile) -> None:
    """Replaces the file atomically: a reader sees the old state or the new one."""
    fresh = home / "services.json.new"
    fresh.write_text(state.model_dump_json(indent=2))
    fresh.replace(home / "services.json")


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Locks the state folder against every other process and thread."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = (home / "services.lock").open("w")
    except OSError as error:
        raise ServiceError(
            f"the state folder {home} cannot be used: {error}; set NOETL_HOME to another folder"
        ) from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
